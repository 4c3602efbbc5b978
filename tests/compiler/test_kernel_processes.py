"""Kernels of ours are compiled by processes as they would be here; what those cannot do is done here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.compiler import ASTSource

from piecegraph.compiler import kernel_child, kernel_processes, triton_compat
from piecegraph.compiler.early_processes import EarlyProcesses
from piecegraph.compiler.kernel_processes import CORES_LEFT, MOST, KernelProcesses, num_processes
from piecegraph.compiler.stored import own_kernels
from piecegraph.compiler.stored.own_kernels import OwnKernels
from piecegraph.compiler.triton_compat import KernelFolder, compile_said, said_of
from piecegraph.environment import for_child
from piecegraph.passes.kernels.sliced_linear import sliced_kernel
from tests.compiler.stored.kernel_caches import GPU, OF, cache_in, gpu_machine
from tests.compiler.triton_without_gpu import TARGET, NoGpu, forget_compiled, kept_by_triton, no_gpu, small, warm_up

__all__ = ["gpu_machine", "no_gpu"]
pytestmark = pytest.mark.usefixtures("gpu_machine", "no_gpu")

OPTIONS = {"num_warps": 2, "num_stages": 2}


def source(size: int = 64) -> Any:
    return ASTSource(small, {"x": "*fp32", "SIZE": "constexpr"}, constexprs={"SIZE": size})


@pytest.fixture(scope="module")
def processes() -> Iterator[KernelProcesses]:
    made = KernelProcesses(2)
    yield made
    made.close()


def test_a_process_makes_what_is_made_here(processes: KernelProcesses, tmp_path: Path) -> None:
    """The same binary, and all of what is known of it."""
    said = said_of(source(), TARGET, OPTIONS)
    assert said is not None
    here = {name: Path(path).read_bytes() for name, path in compile_said(said, KernelFolder(tmp_path)).items()}
    made = processes.compile(said)
    assert made is not None and made.kernels == {said["fingerprint"]: here}
    assert {name.rpartition(".")[2] for name in here} == {"cubin", "json"}


def test_many_ask_at_once(processes: KernelProcesses) -> None:
    said = [said_of(source(16 << number), TARGET, OPTIONS) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(processes.compile, [each for each in said if each is not None]))
    assert len(found) == 6 and all(found)
    assert len({files["small.cubin"] for made in found if made for files in made.kernels.values()}) == 6


def test_what_cannot_be_said_is_not() -> None:
    """A function that its module does not have by its name, and values that are no data."""
    local = type("Source", (), {"fn": sliced_kernel, "name": "another", "signature": {}, "constants": {}, "attrs": {}})
    assert said_of(local, TARGET, OPTIONS) is None
    assert said_of(source(), TARGET, {**OPTIONS, "extra": object()}) is None
    assert said_of(source(), TARGET, {**OPTIONS, "extra": {1: 2}}) is None
    assert said_of(source(), TARGET, {**OPTIONS, "extra": (("a", "b"),)}) is not None


def test_what_fails_there_fails_there_alone(processes: KernelProcesses) -> None:
    said = said_of(source(17), TARGET, OPTIONS)  # no power of two
    assert said is not None and processes.compile(said) is None
    good = said_of(source(128), TARGET, OPTIONS)
    assert good is not None and processes.compile(good)


def test_without_living_processes_nothing_is_waited_for() -> None:
    made = KernelProcesses(1)
    said = said_of(source(), TARGET, OPTIONS)
    assert said is not None
    os.kill(made._all[0].pid, signal.SIGKILL)
    assert made.compile(said) is None and made.compile(said) is None
    made.close()
    closed = KernelProcesses(1)
    closed.close()
    closed.close()
    assert closed.compile(said) is None


def test_who_is_interrupted_leaves_no_answer_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has anybody wait for the process."""
    made = KernelProcesses(1)
    made.driver()
    said = said_of(source(), TARGET, OPTIONS)
    assert said is not None

    def interrupted(process: Any, line: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "_ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.compile(said)
    assert made.compile(said) is None
    made._all[0].wait(10)
    made.close()


def test_half_an_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = KernelProcesses(1)
    made.driver()
    said = said_of(source(), TARGET, OPTIONS)
    assert said is not None
    monkeypatch.setattr(made, "_ask", lambda process, line: '{"files": {"small.cub')
    assert made.compile(said) is None and made.compile(said) is None
    made.close()


def test_another_kernel_there_is_none(processes: KernelProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings made, or sources changed, since it started."""
    from triton import knobs

    monkeypatch.setitem(vars(knobs.compilation), "disable_line_info", True)
    said = said_of(source(), TARGET, OPTIONS)
    assert said is not None and processes.compile(said) is None
    monkeypatch.undo()
    same = said_of(source(), TARGET, OPTIONS)
    assert same is not None and same["fingerprint"] != said["fingerprint"] and processes.compile(same)


def test_what_is_closed_holds_no_file() -> None:
    made = KernelProcesses(2)
    made.close()
    pipes = [pipe for process in made._all for pipe in (process.stdin, process.stdout)]
    assert all(pipe is not None and pipe.closed for pipe in pipes) and made._log.closed


def test_a_start_has_its_kernels_compiled_by_them(processes: KernelProcesses, tmp_path: Path, no_gpu: NoGpu) -> None:
    """And counts and keeps them as its own; nothing of them is in Triton's cache."""
    own = OwnKernels()
    use = own.begin(cache_in(tmp_path), OF, GPU)
    assert use is not None
    own.processes = processes
    first = warm_up(small)
    assert (use.loaded, use.compiled) == (0, 1) and own.keep() == ""
    assert not kept_by_triton(tmp_path)
    forget_compiled()
    again = OwnKernels()
    use = again.begin(cache_in(tmp_path), OF, GPU)
    assert use is not None
    assert warm_up(small).asm["cubin"] == first.asm["cubin"] and (use.loaded, use.compiled) == (1, 0)
    assert no_gpu.loaded[0] == no_gpu.loaded[1]


def test_modules_of_launchers_come_with_a_kernel(
    processes: KernelProcesses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And are where Triton looks for them. So is the driver's, unless a cache has it."""
    path = tmp_path / "launcher.so"
    path.write_bytes(b"module")
    ask = processes._ask

    def with_launcher(process: Any, line: str) -> str:
        return json.dumps(json.loads(ask(process, line)) | {"libraries": {"ab/launcher.so": str(path)}}) + "\n"

    monkeypatch.setattr(processes, "_ask", with_launcher)
    monkeypatch.setattr(processes, "driver", lambda: {"cd/driver.so": b"driver"})
    monkeypatch.setattr(triton_compat, "has_driver", lambda: False)
    monkeypatch.setattr(triton_compat, "start_driver", lambda folder: None)
    monkeypatch.setattr(own_kernels, "early_processes", lambda: SimpleNamespace(kernels=lambda: processes))
    own = OwnKernels()
    assert own.begin(cache_in(tmp_path), OF, GPU) is not None and own._folder is not None
    assert own._folder.libraries == {"cd/driver.so": b"driver"}
    warm_up(small)
    assert own._folder.libraries == {"cd/driver.so": b"driver", "ab/launcher.so": b"module"}
    assert own.keep() == ""
    monkeypatch.setattr(processes, "driver", lambda: pytest.fail("the cache has it, or it runs"))
    again = OwnKernels()
    assert again.begin(cache_in(tmp_path), OF, GPU) is not None and again._folder is not None
    assert again._folder.libraries == own._folder.libraries
    monkeypatch.setattr(triton_compat, "has_driver", lambda: True)
    third = OwnKernels()
    assert third.begin(cache_in(tmp_path / "another"), OF, GPU) is not None


def test_the_driver_is_asked_for_by_name(tmp_path: Path) -> None:
    """And answered with what was made for it, by whoever can make it."""
    code = (
        "import sys; from pathlib import Path; from piecegraph.compiler import kernel_child, triton_compat\n"
        "def make(folder):\n"
        "    with folder.used(): triton_compat._Files('ab' * 32, folder).put(b'driver', 'cuda_utils.so')\n"
        "triton_compat.make_driver = make; kernel_child.main()"
    )
    lines = json.dumps(kernel_child.DRIVER) + "\n" + json.dumps(kernel_child.DRIVER) + "\n"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=for_child({}), input=lines, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    first, again = map(json.loads, done.stdout.splitlines())
    ((name, path),) = first["libraries"].items()
    assert name.endswith("/cuda_utils.so") and Path(path).read_bytes() == b"driver"
    assert (first["fingerprint"], first["files"], again["libraries"]) == (None, {}, {})


def test_what_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has begun when the second fails, and the reason is what is told."""
    begun: list[Any] = []
    start = KernelProcesses._start

    def start_one(processes: KernelProcesses) -> Any:
        if begun:
            raise OSError("no processes left")
        begun.append(start(processes))
        return begun[0]

    monkeypatch.setattr(KernelProcesses, "_start", start_one)
    with pytest.raises(OSError, match="no processes left"):
        KernelProcesses(2)
    assert begun[0].poll() is not None and begun[0].stdin.closed and begun[0].stdout.closed


def test_the_driver_is_made_by_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, as soon as it can; where there is no CUDA there is none, and no process is lost."""
    made = KernelProcesses(1)
    names = [path.rpartition("/")[2] for path in made.driver()]
    assert len(names) == torch.cuda.is_available() and all(name.startswith("cuda_utils") for name in names)
    said = said_of(source(), TARGET, OPTIONS)
    assert said is not None and made.compile(said)
    made.close()
    closed = KernelProcesses(1)
    closed.close()
    assert closed.driver() == {}


def test_a_start_takes_those_that_began_early(
    processes: KernelProcesses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the next one, that has none, does without."""
    early = EarlyProcesses(0, lambda: False)
    monkeypatch.setattr(early, "kernels", lambda: processes)
    monkeypatch.setattr(own_kernels, "early_processes", lambda: early)
    own = OwnKernels()
    assert own.begin(cache_in(tmp_path), OF, GPU) is not None and own.processes is processes
    monkeypatch.setattr(own_kernels, "early_processes", lambda: None)
    assert own.begin(cache_in(tmp_path), OF, GPU) is not None and own.processes is None


def test_how_many_there_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_processes, "GPU", tmp_path)
    for cores, number in ((1, 0), (CORES_LEFT, 0), (CORES_LEFT + 1, 1), (CORES_LEFT + MOST, MOST), (400, MOST)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert num_processes(None) == num_processes(1000) == number and num_processes(2) == min(number, 2)
    monkeypatch.setattr(kernel_processes, "GPU", tmp_path / "none")
    assert num_processes(None) == 0
