"""Child processes compile our kernels as this process would; this process compiles what they cannot."""

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

from piecegraph.compiler.own_kernels import registry as own_kernels
from piecegraph.compiler.own_kernels.registry import OwnKernels
from piecegraph.compiler.triton import compat as triton_compat
from piecegraph.compiler.triton.compat import KernelFolder, compile_kernel_spec, to_kernel_spec
from piecegraph.compiler.workers import kernel_child, kernel_processes
from piecegraph.compiler.workers.kernel_processes import CORES_LEFT, MOST, KernelProcesses, num_processes
from piecegraph.compiler.workers.prestart import EarlyProcesses
from piecegraph.environment import child_environment
from piecegraph.passes.kernels.linear.sliced_linear import sliced_kernel
from tests.compiler.own_kernels.kernel_caches import GPU, OF, cache_in, gpu_machine
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


@pytest.mark.slow
def test_a_child_compiles_the_same_kernel_as_this_process(processes: KernelProcesses, tmp_path: Path) -> None:
    """The binary and its metadata are equal."""
    spec = to_kernel_spec(source(), TARGET, OPTIONS)
    assert spec is not None
    here = {name: Path(path).read_bytes() for name, path in compile_kernel_spec(spec, KernelFolder(tmp_path)).items()}
    made = processes.compile(spec)
    assert made is not None and made.kernels == {spec["fingerprint"]: here}
    assert {name.rpartition(".")[2] for name in here} == {"cubin", "json"}


@pytest.mark.slow
def test_threads_may_ask_concurrently(processes: KernelProcesses) -> None:
    spec = [to_kernel_spec(source(16 << number), TARGET, OPTIONS) for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(processes.compile, [each for each in spec if each is not None]))
    assert len(found) == 6 and all(found)
    assert len({files["small.cubin"] for made in found if made for files in made.kernels.values()}) == 6


def test_a_kernel_that_is_not_plain_data_has_no_spec() -> None:
    """A function that its module does not have under its name, and options that are not JSON, give None."""
    local = type("Source", (), {"fn": sliced_kernel, "name": "another", "signature": {}, "constants": {}, "attrs": {}})
    assert to_kernel_spec(local, TARGET, OPTIONS) is None
    assert to_kernel_spec(source(), TARGET, {**OPTIONS, "extra": object()}) is None
    assert to_kernel_spec(source(), TARGET, {**OPTIONS, "extra": {1: 2}}) is None
    assert to_kernel_spec(source(), TARGET, {**OPTIONS, "extra": (("a", "b"),)}) is not None


def test_a_failed_compile_does_not_end_the_child(processes: KernelProcesses) -> None:
    spec = to_kernel_spec(source(17), TARGET, OPTIONS)  # no power of two
    assert spec is not None and processes.compile(spec) is None
    good = to_kernel_spec(source(128), TARGET, OPTIONS)
    assert good is not None and processes.compile(good)


def test_a_compile_does_not_wait_when_all_children_are_dead() -> None:
    made = KernelProcesses(1)
    spec = to_kernel_spec(source(), TARGET, OPTIONS)
    assert spec is not None
    os.kill(made._all[0].process.pid, signal.SIGKILL)
    assert made.compile(spec) is None and made.compile(spec) is None
    made.close()
    closed = KernelProcesses(1)
    closed.close()
    closed.close()
    assert closed.compile(spec) is None


def test_an_interrupted_caller_leaves_no_answer_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child is killed, so nobody waits for it either."""
    made = KernelProcesses(1)
    made.driver()
    spec = to_kernel_spec(source(), TARGET, OPTIONS)
    assert spec is not None

    def interrupted(process: Any, line: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "_ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.compile(spec)
    assert made.compile(spec) is None
    made._all[0].process.wait(10)
    made.close()


def test_an_incomplete_answer_counts_as_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = KernelProcesses(1)
    made.driver()
    spec = to_kernel_spec(source(), TARGET, OPTIONS)
    assert spec is not None
    monkeypatch.setattr(made, "_ask", lambda process, line: '{"files": {"small.cub')
    assert made.compile(spec) is None and made.compile(spec) is None
    made.close()


def test_a_kernel_with_another_fingerprint_in_the_child_is_refused(
    processes: KernelProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings or sources may have changed since the child started."""
    from triton import knobs

    monkeypatch.setitem(vars(knobs.compilation), "disable_line_info", True)
    spec = to_kernel_spec(source(), TARGET, OPTIONS)
    assert spec is not None and processes.compile(spec) is None
    monkeypatch.undo()
    same = to_kernel_spec(source(), TARGET, OPTIONS)
    assert same is not None and same["fingerprint"] != spec["fingerprint"] and processes.compile(same)


def test_close_closes_every_file() -> None:
    made = KernelProcesses(2)
    made.close()
    pipes = [pipe for process in made._all for pipe in (process.process.stdin, process.process.stdout, process.log)]
    assert all(pipe is not None and pipe.closed for pipe in pipes)


def test_kernels_of_a_start_are_compiled_by_children(processes: KernelProcesses, tmp_path: Path, no_gpu: NoGpu) -> None:
    """They are counted and saved as usual, and Triton's own cache holds none of them."""
    own = OwnKernels()
    use = own.begin(cache_in(tmp_path), OF, GPU)
    assert use is not None
    own.processes = processes
    first = warm_up(small)
    assert (use.loaded, use.compiled) == (0, 1) and own.save() == ""
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
    """They are written where Triton looks for them, and so is the driver's module unless the cache has it."""
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
    assert own.save() == ""
    monkeypatch.setattr(processes, "driver", lambda: pytest.fail("the cache has it, or it runs"))
    again = OwnKernels()
    assert again.begin(cache_in(tmp_path), OF, GPU) is not None and again._folder is not None
    assert again._folder.libraries == own._folder.libraries
    monkeypatch.setattr(triton_compat, "has_driver", lambda: True)
    third = OwnKernels()
    assert third.begin(cache_in(tmp_path / "another"), OF, GPU) is not None


@pytest.mark.slow
def test_the_driver_job_returns_the_driver_module_once(tmp_path: Path) -> None:
    """A second request returns no new module."""
    code = (
        "import sys; from pathlib import Path; from piecegraph.compiler.workers import kernel_child\n"
        "from piecegraph.compiler.triton import compat\n"
        "def make(folder):\n"
        "    with folder.used(): compat._Files('ab' * 32, folder).put(b'driver', 'cuda_utils.so')\n"
        "compat.make_driver = make; kernel_child.main()"
    )
    lines = json.dumps(kernel_child.DRIVER) + "\n" + json.dumps(kernel_child.DRIVER) + "\n"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=child_environment({}), input=lines,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    first, again = map(json.loads, done.stdout.splitlines())
    ((name, path),) = first["libraries"].items()
    assert name.endswith("/cuda_utils.so") and Path(path).read_bytes() == b"driver"
    assert (first["fingerprint"], first["files"], again["libraries"]) == (None, {}, {})


def test_a_failed_start_ends_the_children_that_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first child has started when the second fails; the error is raised and the first child is ended."""
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
    child = begun[0].process
    assert child.poll() is not None and child.stdin.closed and child.stdout.closed and begun[0].log.closed


def test_one_child_makes_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once, early; without CUDA there is none, and no child is lost."""
    made = KernelProcesses(1)
    names = [path.rpartition("/")[2] for path in made.driver()]
    assert len(names) == torch.cuda.is_available() and all(name.startswith("cuda_utils") for name in names)
    spec = to_kernel_spec(source(), TARGET, OPTIONS)
    assert spec is not None and made.compile(spec)
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
