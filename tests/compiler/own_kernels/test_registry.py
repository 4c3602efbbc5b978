"""Our kernels come from the cache, other kernels do not, and a problem of the cache costs a compile, not an error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.runtime import compile_tasks
from triton.compiler import make_backend

import piecegraph as pg
from piecegraph import environment
from piecegraph.compiler.own_kernels import registry as own_kernels
from piecegraph.compiler.own_kernels import store as kernel_store
from piecegraph.compiler.own_kernels.registry import KernelUse, OwnKernels
from piecegraph.compiler.own_kernels.store import graphs_key
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.triton import compat as triton_compat
from piecegraph.compiler.triton.kernel_pack import KernelFiles
from piecegraph.passes.kernels.common.own_kernel import NotKept, compile_with, loading_only
from tests.compiler.own_kernels.kernel_caches import GPU, OF, cache_in, gpu_machine, store_in
from tests.compiler.store.small_models import SIZE, Small, call_by_name, compiled
from tests.compiler.triton_without_gpu import (
    TARGET,
    NoGpu,
    forget_compiled,
    kept_by_triton,
    no_gpu,
    others,
    small,
    warm_up,
)

__all__ = ["gpu_machine", "no_gpu"]
pytestmark = pytest.mark.usefixtures("gpu_machine", "no_gpu")

Process = Callable[..., tuple[OwnKernels, KernelUse]]


@pytest.fixture
def new_process(tmp_path: Path) -> Process:
    """What a process has after a start has begun: nothing compiled. `of`: which model's."""

    def begin(of: str = OF) -> tuple[OwnKernels, KernelUse]:
        forget_compiled()
        own = OwnKernels()
        use = own.begin(cache_in(tmp_path), of, GPU)
        assert use is not None
        return own, use

    return begin


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: Any) -> None:
        raise AssertionError("something is compiled")

    monkeypatch.setattr(type(make_backend(TARGET)), "add_stages", raises)


def counts(use: KernelUse) -> tuple[int, int]:
    return use.loaded, use.compiled


def test_a_second_process_compiles_nothing(
    new_process: Process, no_gpu: NoGpu, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """And loads the same binary, from the cache and not from Triton's."""
    own, use = new_process()
    first = warm_up(small)
    assert counts(use) == (0, 1)
    assert own.save() == ""
    request.getfixturevalue("no_compiler")
    own, use = new_process()
    second = warm_up(small)
    assert counts(use) == (1, 0)
    assert (second.kernel, second.metadata, second.packed_metadata, second.hash) == (
        first.kernel,
        first.metadata,
        first.packed_metadata,
        first.hash,
    )
    assert no_gpu.loaded == [first.kernel, first.kernel]
    assert kept_by_triton(tmp_path) == set()


def test_saved_kernels_load_without_a_compile(new_process: Process) -> None:
    """A missing kernel is reported, and nothing is compiled."""
    own, use = new_process()
    with loading_only(), pytest.raises(NotKept, match="small"):
        warm_up(small)
    assert counts(use) == (0, 0)
    warm_up(small)
    own.save()
    _, use = new_process()
    with loading_only():
        warm_up(small)
    assert counts(use) == (1, 0)


def test_torchs_ptxas_compiles_every_kernel(
    new_process: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torch sets it with the first kernel of Inductor's: before ours in one start, after them in another."""
    theirs = Path(torch.__file__).parent / "bin" / "ptxas"
    has = [False]

    def set_path() -> None:
        if has[0]:
            monkeypatch.setenv("TRITON_PTXAS_PATH", str(theirs))

    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", set_path)
    monkeypatch.setattr(type(make_backend(TARGET)), "make_cubin", lambda *args: b"binary")
    own, use = new_process()
    warm_up(small)
    own.save()
    has[0] = True
    own, use = new_process()
    warm_up(small)
    assert counts(use) == (0, 1)
    own.save()
    _, use = new_process()
    compile_tasks._set_triton_ptxas_path()
    warm_up(small)
    assert counts(use) == (1, 0)


def test_new_kernels_are_added_to_the_entry(new_process: Process) -> None:
    own, _ = new_process()
    warm_up(small, 16)
    own.save()
    own, use = new_process()
    warm_up(small, 16)
    warm_up(small, 32)
    assert counts(use) == (1, 1)
    assert own.save() == ""
    own, use = new_process()
    warm_up(small, 32)
    warm_up(small, 16)
    assert counts(use) == (2, 0)


def test_kernels_that_a_request_compiles_are_saved_after_a_delay(
    new_process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks for it."""
    monkeypatch.setattr(own_kernels, "SAVE_AFTER_S", 0.01)
    own, _ = new_process()
    warm_up(small)
    assert own._timer is not None
    own._timer.join()
    _, use = new_process()
    warm_up(small)
    assert counts(use) == (1, 0)


def test_foreign_kernels_stay_in_tritons_cache(new_process: Process, tmp_path: Path) -> None:
    own, use = new_process()
    warm_up(others)
    assert counts(use) == (0, 0)
    assert kept_by_triton(tmp_path) == {"others"}
    own.save()
    assert not (tmp_path / "cache").exists()


def test_kernels_are_left_to_triton_before_a_model_begins(tmp_path: Path) -> None:
    """The same holds without a cache, and on a CPU."""
    own = OwnKernels()
    assert own.begin(CompileCache(None, False, "PIECEGRAPH_CACHE=off"), OF, GPU) is None
    assert own.begin(cache_in(tmp_path), OF, torch.device("cpu")) is None
    warm_up(small)
    assert kept_by_triton(tmp_path) == {"small"}
    assert own.save() == ""
    assert not (tmp_path / "cache").exists()


def test_an_unknown_triton_works_without_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is not there too, of which nobody is told."""
    monkeypatch.delattr("piecegraph.compiler.triton.compat")
    monkeypatch.setitem(sys.modules, "piecegraph.compiler.triton.compat", None)
    assert OwnKernels().begin(cache_in(tmp_path), OF, GPU) is None
    assert "this version of Triton is unknown" in caplog.text
    caplog.clear()
    monkeypatch.setattr(own_kernels, "find_spec", lambda name: None)
    assert OwnKernels().begin(cache_in(tmp_path), OF, GPU) is None
    assert not caplog.text


@pytest.mark.parametrize(("is_only_read", "is_kept"), [(False, False), (True, True), (True, False)])
def test_the_driver_module_is_not_made_for_a_read_only_cache(
    is_only_read: bool, is_kept: bool, new_process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked for in our folder only where it is there, or will be for the next process."""
    if is_kept:
        store_in(tmp_path).save(KernelFiles({}, {"driver/cuda_utils.so": b"so"}), set(), 0.0)
    begun: list[object] = []
    monkeypatch.setattr(triton_compat, "start_driver", begun.append)
    monkeypatch.setattr(kernel_store.KernelStore, "is_only_read", is_only_read)
    new_process()
    assert len(begun) == (not is_only_read or is_kept)


def test_tritons_own_cache_is_not_read(new_process: Process, no_gpu: NoGpu, tmp_path: Path) -> None:
    """Other users may be able to write it."""
    warm_up(small)
    for binary in (tmp_path / "triton").rglob("*.cubin"):
        binary.write_bytes(b"poison")
    new_process()
    warm_up(small)
    assert b"poison" not in no_gpu.loaded


@pytest.mark.parametrize(
    "files", [{"small.json": b"{}", "small.cubin": b""}, {"small.cubin": b""}, {"small.json": b"\xff"}]
)
def test_kernels_that_cannot_be_loaded_are_compiled_and_replaced(
    files: dict[str, bytes], new_process: Process, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, _ = new_process()
    warm_up(small)
    own.save()
    store = store_in(tmp_path)
    (fingerprint,) = store.load().kernels
    store.reject(fingerprint)
    store.save(KernelFiles({fingerprint: files}), {fingerprint}, 0.0)

    own, use = new_process()
    warm_up(small)
    assert counts(use) == (0, 1)
    assert "kernel small of the cache cannot be loaded" in caplog.text
    assert own.save() == ""
    own, use = new_process()
    warm_up(small)
    assert counts(use) == (1, 0)


def test_a_corrupt_entry_is_compiled_and_replaced(new_process: Process, tmp_path: Path) -> None:
    own, _ = new_process()
    warm_up(small)
    own.save()
    for blob in (tmp_path / "cache" / "v1" / "blobs").iterdir():
        blob.write_bytes(b"\0" * blob.stat().st_size)
    own, use = new_process()
    warm_up(small)
    assert counts(use) == (0, 1)
    assert own.save() == ""
    assert len(list((tmp_path / "cache" / "v1" / "quarantine").iterdir())) == 1
    own, use = new_process()
    warm_up(small)
    assert counts(use) == (1, 0)


def test_a_full_disk_is_reported_as_the_reason(new_process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    own, use = new_process()
    warm_up(small)
    monkeypatch.setattr("piecegraph.cache.store.store.put_blob", full)
    assert "No space left" in own.save()
    assert "No space left" in use.not_stored
    assert own.save() == ""  # it is not tried again for the same kernels


def full(*args: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("is_kept", [False, True])
def test_no_room_for_temporary_files_leaves_kernels_to_triton(
    is_kept: bool,
    new_process: Process,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those that the cache has and those that it lacks: its own cache may be elsewhere."""
    if is_kept:
        own, _ = new_process()
        warm_up(small)
        own.save()
    own, use = new_process()
    with monkeypatch.context() as patch:
        patch.setattr(triton_compat._Files, "put", full)
        patch.setattr(own_kernels, "_written", full)
        warm_up(small)
    assert counts(use) == (0, 0)
    assert kept_by_triton(tmp_path) == {"small"}
    assert "kernel small is not kept in the cache ([Errno 28] No space left on device)" in caplog.text


def test_no_folder_to_load_from_leaves_kernels_to_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_kernels, "private_folder", full)
    own = OwnKernels()
    assert own.begin(cache_in(tmp_path), OF, GPU) is None
    assert "no folder to load them from ([Errno 28] No space left on device)" in caplog.text
    warm_up(small)
    assert kept_by_triton(tmp_path) == {"small"}


def test_a_kernel_compiled_while_another_model_begins_is_saved_for_that_model(
    new_process: Process, tmp_path: Path
) -> None:
    """The first model's kernels are saved when the second begins, and are not saved again."""
    own, first = new_process("1" * 64)

    def compile_slowly(plain: Callable[..., Any], src: Any, **how: Any) -> Any:
        def begins_meanwhile(src: Any, **how: Any) -> Any:
            made = plain(src, **how)
            own.begin(cache_in(tmp_path), "2" * 64, GPU)
            return made

        return own.compile(begins_meanwhile, src, **how)

    compile_with(compile_slowly)
    warm_up(small)
    assert counts(first) == (0, 0)
    assert own.save() == ""
    assert len(store_in(tmp_path, "2" * 64).load().kernels) == 1


def test_kernels_missing_in_a_read_only_cache_are_left_to_triton(
    new_process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has is loaded; the rest would be compiled in every process."""
    own, _ = new_process()
    warm_up(small, 16)
    own.save()
    monkeypatch.setattr(kernel_store.KernelStore, "is_only_read", True)
    own, use = new_process()
    warm_up(small, 16)
    warm_up(small, 32)
    assert counts(use) == (1, 0)
    assert kept_by_triton(tmp_path) == {"small"}
    assert own.save() == ""


def test_kernels_of_a_model_without_a_cache_are_not_saved_for_another(new_process: Process, tmp_path: Path) -> None:
    own, use = new_process()
    warm_up(small, 16)
    assert own.begin(CompileCache(None, True), "1" * 64, GPU) is None
    warm_up(small, 32)
    own.save()
    assert counts(use) == (0, 1)
    assert len(store_in(tmp_path).load().kernels) == 1
    assert kept_by_triton(tmp_path) == {"small"}


def test_the_entry_of_a_second_model_has_the_shared_kernels(new_process: Process, tmp_path: Path) -> None:
    """Triton compiles a shared kernel once per process. The first model's entry does not change."""
    own, _ = new_process("1" * 64)
    warm_up(small, 16)
    second = own.begin(cache_in(tmp_path), "2" * 64, GPU)
    assert second is not None
    assert second.store.key != store_in(tmp_path, "1" * 64).key
    warm_up(small, 16)
    warm_up(small, 32)
    assert counts(second) == (0, 1)
    own.save()
    assert len(store_in(tmp_path, "1" * 64).load().kernels) == 1
    assert len(store_in(tmp_path, "2" * 64).load().kernels) == 2


def test_a_model_that_begins_again_is_not_saved_again(new_process: Process, tmp_path: Path) -> None:
    own, _ = new_process()
    warm_up(small, 16)
    own.save()
    entry = next((tmp_path / "cache" / "v1" / "entries").iterdir())
    before = entry.read_bytes()
    own.begin(cache_in(tmp_path), OF, GPU)
    own.save()
    assert entry.read_bytes() == before


def test_modules_of_launchers_are_saved(new_process: Process, no_gpu: NoGpu, tmp_path: Path) -> None:
    """Triton 3.6 makes one when a kernel is first launched, which may be after the kernel was saved."""
    from triton.runtime.cache import get_cache_manager

    compiled = []

    class Launcher:
        def __init__(self, src: Any, metadata: Any) -> None:
            files = get_cache_manager("cd" * 32)
            if files.get_file("launcher.so") is None:
                compiled.append(files.put(b"so", "launcher.so"))

    no_gpu.launcher_cls = Launcher  # type: ignore[misc]  # of this driver alone
    own, _ = new_process()
    made = small.warmup(torch.float32, SIZE=16, grid=(1,))
    own.save()
    made._init_handles()
    assert own.save() == ""
    own, use = new_process()
    warm_up(small)
    assert counts(use) == (1, 0)
    assert len(compiled) == 1
    assert not (tmp_path / "triton").exists()


def test_debug_hooks_of_triton_turn_the_registry_off(
    new_process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, use = new_process()
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    warm_up(small)
    assert counts(use) == (0, 0)
    assert kept_by_triton(tmp_path) == {"small"}


def test_threads_compile_and_load_at_once(new_process: Process) -> None:
    sizes = [16, 32, 64, 128, 16, 32, 64, 128]
    for expected in ("compiled", "loaded"):
        own, use = new_process()
        with ThreadPoolExecutor(8) as pool:
            kernels = list(pool.map(lambda size: warm_up(small, size), sizes))
        assert [each.kernel for each in kernels[:4]] == [each.kernel for each in kernels[4:]]
        assert getattr(use, expected) >= 4
        assert sum(counts(use)) == getattr(use, expected)
        own.save()


def test_a_report_counts_loaded_and_compiled_kernels(new_process: Process, whole_cache: Path) -> None:
    """The counts belong to the model's plan and include later compiles."""
    report = compiled(Small()).report()
    own, _ = new_process(report.cache.key)
    warm_up(small)
    told = own.with_kernel_counts(report)
    assert (told.cache.loaded_kernels, told.cache.compiled_kernels, told.cache.not_stored) == (0, 1, "")
    assert "kernels of ours: 0 loaded, 1 compiled" in str(told)
    assert own.with_kernel_counts(compiled(Small(), cache="pieces").report()).cache.compiled_kernels == 0
    assert "kernels of ours" not in str(report)


def test_kernels_without_a_plan_are_saved_under_the_graphs_key(tmp_path: Path, whole_cache: Path) -> None:
    """A start that has begun for its plan keeps using the plan's key."""
    model = compiled(Small(), cache="pieces")
    own = OwnKernels()
    own.begin_without_plan(cache_in(tmp_path), model.unique_pieces, GPU)
    warm_up(small)
    assert own.with_kernel_counts(model.report()).cache.compiled_kernels == 1
    planned = cache_in(tmp_path)
    own.begin(planned, OF, GPU)
    own.begin_without_plan(planned, model.unique_pieces, GPU)
    warm_up(small, 32)
    assert own.with_kernel_counts(model.report()).cache.compiled_kernels == 1


def test_starts_and_captures_begin_and_save_the_right_model(whole_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan's key before its lookup; the graphs' key without plans and under torch.compile; a save after each."""
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(OwnKernels, "begin", lambda self, cache, of, device: asked.append((of, device.type)))
    monkeypatch.setattr(OwnKernels, "save", lambda self: asked.append(("kept", "")))
    planned = compiled(Small())
    key = planned.report().cache.key
    graphs = graphs_key(row.key for row in planned.report().unique_pieces)
    assert asked[0] == (key, "cpu")
    assert asked[-1] == ("kept", "")
    asked.clear()
    pieces = compiled(Small(), cache="pieces")
    assert asked == [(graphs, "cpu"), ("kept", "")]
    asked.clear()
    sizes = [pg.BatchDescriptor(num_tokens=2)]
    with pg.capture(pieces, sizes, lambda size: (torch.ones(size.num_tokens, SIZE),), mode="FULL", kind="recorded"):
        assert asked == [("kept", "")]
    asked.clear()
    call_by_name(Small())
    assert [device for _, device in asked] == ["cpu", ""]


IN_A_PROCESS = """
import sys
from pathlib import Path
from piecegraph.compiler.own_kernels import store as kernel_store
from tests.compiler.own_kernels.kernel_caches import GPU, MACHINE, OF, cache_in
from tests.compiler.triton_without_gpu import NoGpu, small, warm_up, driver
from piecegraph.compiler.own_kernels.registry import OWN_KERNELS
kernel_store.machine_factors = lambda device: MACHINE
driver.set_active(NoGpu())
use = OWN_KERNELS.begin(cache_in(Path(sys.argv[1])), OF, GPU)
if "no_compiler" in sys.argv:
    from triton.backends.nvidia.compiler import CUDABackend
    CUDABackend.add_stages = None
warm_up(small, 16)
print(use.loaded, use.compiled)
"""


@pytest.mark.slow
def test_the_end_of_a_process_saves_new_kernels_and_the_next_loads_them(tmp_path: Path) -> None:
    """Nothing calls `save` explicitly, and the processes are new interpreters."""

    def run(*arguments: str) -> str:
        command = [sys.executable, "-W", "ignore", "-c", IN_A_PROCESS, str(tmp_path), *arguments]
        child = environment.child_environment({"TRITON_CACHE_DIR": str(tmp_path / "triton")})
        return subprocess.run(command, env=child, check=True, capture_output=True, text=True).stdout.strip()

    assert run() == "0 1"
    assert run("no_compiler") == "1 0"
    assert not (tmp_path / "triton").exists()
