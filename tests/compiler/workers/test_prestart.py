"""Compile processes that start early: the first compile inside the block takes them, otherwise the block ends them."""

from __future__ import annotations

import subprocess
import threading
from typing import ClassVar

import pytest
import torch

import piecegraph as pg
from piecegraph.compiler.building.inductor_pieces import InductorPieceCompiler
from piecegraph.compiler.workers import kernel_processes
from piecegraph.compiler.workers.pool import CompilePool
from piecegraph.compiler.workers.prestart import EarlyProcesses, early_processes, started_early
from piecegraph.compiler.workers.process import CompileProcess, num_at_once, num_workers


class Started:
    """Processes that were started, and how many pools were made with how many of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: list[CompileProcess] = []
        start = CompileProcess.start

        def recorded(*folders: object) -> CompileProcess:
            self.processes.append(start(*folders))  # type: ignore[arg-type]
            return self.processes[-1]

        monkeypatch.setattr(CompileProcess, "start", recorded)

    @property
    def living(self) -> int:
        return sum(each.process.poll() is None for each in self.processes)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(monkeypatch)


def compiled() -> pg.CompiledModel:
    config = pg.CompileConfig(compile_workers=2, cache=False)
    return pg.compile(torch.nn.Linear(4, 4), config, example_inputs=(torch.ones(3, 4),))


@pytest.mark.slow
def test_a_compile_takes_and_ends_the_early_processes(started: Started) -> None:
    """The folders come with the processes, which end with the compile."""
    with started_early(2, lambda: True):
        early = early_processes()
        assert early is not None
        folders = early.folders()
        assert folders is not None and started.living == 1
        model = compiled()
        assert early.folders() is None  # they are taken
        assert len(started.processes) == 1 and started.living == 0
        assert model(torch.ones(3, 4)).shape == (3, 4)
    assert early_processes() is None


def test_artifacts_of_early_processes_are_in_their_folders(started: Started) -> None:
    with started_early(2, lambda: True):
        early = early_processes()
        assert early is not None
        compiler = InductorPieceCompiler({}, 2)
        assert (compiler._inductor, compiler._triton) == early.folders()
    other = InductorPieceCompiler({}, 2)
    assert other._inductor != compiler._inductor and other._triton != compiler._triton


def test_a_failed_start_ends_the_processes_it_took(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no processes left")

    monkeypatch.setattr("piecegraph.compiler.building.inductor_pieces.CompilePool", fail)
    with started_early(2, lambda: True):
        with pytest.raises(OSError, match="no processes left"):
            InductorPieceCompiler({}, 2).start()
        assert len(started.processes) == 1 and started.living == 0


@pytest.mark.slow
def test_only_the_thread_of_the_block_gets_early_processes(started: Started) -> None:
    with started_early(2, lambda: True):
        compiled()
        compiled()
    assert len(started.processes) == 2 and started.living == 0


def test_unused_processes_end_with_the_block(started: Started) -> None:
    with pytest.raises(ZeroDivisionError), started_early(3, lambda: True):
        raise ZeroDivisionError
    assert len(started.processes) == 2 and started.living == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_no_process_starts_when_this_process_compiles(workers: int, started: Started) -> None:
    with started_early(workers, lambda: True):
        assert early_processes() is not None
    assert not started.processes


def test_no_process_starts_when_nothing_will_compile(started: Started) -> None:
    def fail() -> bool:
        raise OSError("the cache cannot be read")

    for are_wanted in (lambda: False, fail):
        with started_early(2, are_wanted):
            early = early_processes()
            assert early is not None and early.folders() is None and early.take() == []
    assert not started.processes


class _Kernels:
    """In place of processes that compile kernels."""

    made: ClassVar[list[_Kernels]] = []

    def __init__(self, number: int) -> None:
        self.number, self.is_closed = number, False
        self.made.append(self)

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("workers", "has_kernels", "most", "number"), [(2, True, 3, 2), (2, True, 0, 0), (2, False, 3, 0), (1, True, 3, 0)]
)
def test_a_gpu_gets_separate_processes_for_kernels(
    workers: int, has_kernels: bool, most: int, number: int, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    """For as long as the block lasts, and as many as workers are allowed."""
    monkeypatch.setattr(kernel_processes, "num_processes", lambda asked: min(asked, most))
    monkeypatch.setattr(kernel_processes, "KernelProcesses", _Kernels)
    _Kernels.made.clear()
    with started_early(workers, lambda: True, has_kernels=has_kernels):
        early = early_processes()
        assert early is not None
        found: object = early.kernels()
        assert [each.number for each in _Kernels.made] == ([number] if number else [])
        assert found is (_Kernels.made[0] if _Kernels.made else None)
        assert not any(each.is_closed for each in _Kernels.made)
        if number:
            assert started.living == 1  # for pieces: most models have none for it
    assert all(each.is_closed for each in _Kernels.made) and started.living == 0


def test_entering_the_block_does_not_wait_for_the_guess() -> None:
    go = threading.Event()
    early = EarlyProcesses(0, go.wait)
    go.set()
    assert early.take() == []


def test_an_early_process_that_cannot_start_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> subprocess.Popen[str]:
        raise OSError("no processes left")

    monkeypatch.setattr(subprocess, "Popen", fail)
    with started_early(2, lambda: True):
        early = early_processes()
        assert early is not None and early.folders() is None


def test_a_pool_with_a_started_process_starts_others_only_for_jobs(started: Started) -> None:
    from piecegraph.compiler.common.private_folder import private_folder

    inductor, triton = private_folder("inductor"), private_folder("triton")
    one = CompileProcess.start(inductor, triton)
    pool = CompilePool(3, inductor, triton, [one])
    assert len(started.processes) == 1
    pool.close()
    pool = CompilePool(3, inductor, triton)
    assert started.living == num_at_once(3) == 2
    pool.close()
    assert started.living == 0


def test_the_default_is_one_process_per_core_and_at_most_four() -> None:
    assert 1 <= num_workers(None) <= 4
    assert (num_workers(0), num_workers(7)) == (0, 7)
    assert [num_at_once(workers) for workers in (1, 2, 4)] == [1, 1, 3]
