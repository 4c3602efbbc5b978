"""What is private to Triton: keys of kernels, its folders, and kernels loaded from files. It compiles for a GPU here,
and needs none for it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

import pytest
import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource, make_backend
from triton.runtime import build, driver
from triton.runtime.cache import FileCacheManager, get_cache_manager

from piecegraph.compiler.triton import compat as triton_compat
from piecegraph.compiler.triton.compat import KernelFolder, StoredKernel, fingerprint
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

__all__ = ["no_gpu"]

KEY = "ab" * 32  # as Triton makes them: hexadecimal


def source(kernel: Any = small, size: int = 16, dtype: str = "*fp32", attrs: dict[Any, Any] | None = None) -> ASTSource:
    return ASTSource(kernel, {"x": dtype, "SIZE": "constexpr"}, {(1,): size}, attrs)


def test_each_thing_that_decides_a_binary_makes_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    aligned = {(0,): [["tt.divisibility", 16]]}
    found = [
        fingerprint(source(), TARGET, {}),
        fingerprint(source(others), TARGET, {}),
        fingerprint(source(size=32), TARGET, {}),
        fingerprint(source(dtype="*fp16"), TARGET, {}),
        fingerprint(source(attrs=aligned), TARGET, {}),
        fingerprint(source(), TARGET, {"num_warps": 8}),
        fingerprint(source(), type(TARGET)("cuda", 80, 32), {}),
    ]
    for variable in ("TRITON_DISABLE_LINE_INFO", "PTXAS_OPTIONS", "DISABLE_LLVM_OPT"):
        with monkeypatch.context() as changed:
            changed.setenv(variable, "1")
            found.append(fingerprint(source(), TARGET, {}))
    assert len(set(found)) == len(found)
    assert fingerprint(source(), TARGET, {}) == found[0]


def test_a_configured_ptxas_is_keyed_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path is not in the fingerprint, and the version of Triton's own ptxas is not asked for."""
    backend = type(make_backend(TARGET))
    version = "one"
    monkeypatch.setattr(backend, "hash", lambda self: version)
    bundled = fingerprint(source(), TARGET, {})
    version = "two"
    assert fingerprint(source(), TARGET, {}) == bundled
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/somewhere/ptxas")
    second = fingerprint(source(), TARGET, {})
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/elsewhere/ptxas")
    assert fingerprint(source(), TARGET, {}) == second
    version = "three"
    assert len({bundled, second, fingerprint(source(), TARGET, {})}) == 3


def test_a_folder_is_used_by_one_thread_and_settings_are_restored(tmp_path: Path, no_gpu: NoGpu) -> None:
    """Another thread's kernels go to Triton's cache, and so do all kernels after the block; the environment stays."""
    folder = KernelFolder(tmp_path / "ours")
    settings, environment = dict(vars(knobs.cache)), dict(os.environ)

    def elsewhere() -> None:
        warm_up(others)

    with folder.used():
        with folder.used():
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        warm_up(small)
        assert os.environ == environment
    assert kept_by_triton(tmp_path) == {"others"}
    assert {path.stem for path in folder.path.rglob("*.cubin")} == {"small"}
    assert vars(knobs.cache) == settings
    with pytest.raises(ValueError, match="body"), folder.used():
        raise ValueError("body")
    assert vars(knobs.cache) == settings


class TheirManager(FileCacheManager):  # type: ignore[misc]  # untyped
    """A cache manager that the user chose."""


@pytest.mark.parametrize("by_environment", [True, False])
def test_the_users_cache_manager_stays_in_use(
    by_environment: bool, tmp_path: Path, no_gpu: NoGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_environment:
        monkeypatch.setenv("TRITON_CACHE_MANAGER", f"{__name__}:{TheirManager.__name__}")
    else:
        monkeypatch.setitem(vars(knobs.cache), "manager_class", TheirManager)
    made = []
    with KernelFolder(tmp_path / "ours").used():
        thread = threading.Thread(target=lambda: made.append(get_cache_manager(KEY)))
        thread.start()
        thread.join()
        made.append(get_cache_manager(KEY))
    made.append(get_cache_manager(KEY))
    names = [type(each).__name__ for each in made]
    assert names == ["TheirManager", "_Files", "TheirManager"]


def test_a_manager_that_is_set_inside_a_block_stays(
    tmp_path: Path, no_gpu: NoGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(vars(knobs.cache), "manager_class", raising=False)
    with KernelFolder(tmp_path / "ours").used():
        vars(knobs.cache)["manager_class"] = TheirManager
    assert knobs.cache.manager_class is TheirManager
    del vars(knobs.cache)["manager_class"]


def test_known_libraries_are_found_and_new_ones_are_recorded(tmp_path: Path, no_gpu: NoGpu) -> None:
    """Triton 3.6 makes a library for each launcher, and every version makes one for its driver."""
    folder = KernelFolder(tmp_path / "ours")
    with folder.used():
        files = get_cache_manager(KEY)
        assert files.get_file("launcher.so") is None
        made = files.put(b"code", "launcher.so", binary=True)
        files.put(b"text", "launcher.txt")
    assert Path(made).is_relative_to(folder.path)
    ((name, data),) = folder.libraries.items()
    assert (name.endswith("/launcher.so"), data) == (True, b"code")

    another = KernelFolder(tmp_path / "others")
    another.libraries |= folder.libraries
    with another.used():
        found = get_cache_manager(KEY).get_file("launcher.so")
    assert found is not None
    assert Path(found).is_relative_to(another.path)
    assert Path(found).read_bytes() == b"code"


def test_compiling_a_kernel_spec_makes_its_launcher_module(
    tmp_path: Path, no_gpu: NoGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of Triton that makes launcher modules makes it here; a failure leaves the kernel usable."""

    def launcher(src: Any, metadata: Any) -> None:
        assert (src.name, metadata.num_warps) == ("small", 4)
        get_cache_manager(KEY).put(b"code", "launcher.so")

    spec = triton_compat.to_kernel_spec(source(), TARGET, {})
    assert spec is not None
    monkeypatch.setattr(nvidia, "make_launcher", None, raising=False)
    monkeypatch.setattr(nvidia, "CudaLauncher", launcher)
    folder = KernelFolder(tmp_path / "ours")
    files = triton_compat.compile_kernel_spec(spec, folder)
    assert set(files) == {"small.json", "small.cubin"} and list(folder.libraries.values()) == [b"code"]
    monkeypatch.setattr(nvidia, "CudaLauncher", lambda src, metadata: 1 / 0)
    assert triton_compat.compile_kernel_spec(spec, KernelFolder(tmp_path / "others")).keys() == files.keys()


def test_a_kernel_is_loaded_from_its_files(tmp_path: Path, no_gpu: NoGpu) -> None:
    """The metadata and the binary suffice; the launcher comes from the folder."""
    made = triton.compile(source(), target=TARGET)
    files = triton_compat.files_of(made)
    assert set(files) == {"small.json", "small.cubin"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    folder = KernelFolder(tmp_path / "ours")
    loaded = StoredKernel(source(), {name: str(tmp_path / name) for name in files}, folder)
    assert (loaded.hash, loaded.kernel, loaded.metadata) == (made.hash, made.kernel, made.metadata)
    used = []

    class Launcher:
        def __init__(self, src: Any, metadata: Any) -> None:
            used.append(get_cache_manager(KEY).cache_dir)

    no_gpu.launcher_cls = Launcher  # type: ignore[misc]  # of this driver alone
    loaded._init_handles()
    assert [Path(each).parent for each in used] == [folder.path]
    assert loaded.function == "small"


def test_files_that_are_no_kernels_raise(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text("{}")
    with pytest.raises(KeyError):
        StoredKernel(source(), {"small.json": str(path)}, KernelFolder(tmp_path))


def test_debug_hooks_of_the_compiler_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not triton_compat.has_debug_hooks()
    for variable in ("TRITON_ALWAYS_COMPILE", "TRITON_KERNEL_DUMP", "TRITON_KERNEL_OVERRIDE"):
        with monkeypatch.context() as changed:
            changed.setenv(variable, "1")
            assert triton_compat.has_debug_hooks()
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *args: None)
    assert triton_compat.has_debug_hooks()


def test_a_driver_that_cannot_start_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the first launch reports it. A driver that has started is not started again."""
    forget_compiled()
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(driver, "_default", None)
    asked = []

    def no_driver() -> None:
        asked.append(type(get_cache_manager(KEY)).__name__)
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr(sys.modules[type(driver).__module__], "_create_driver", no_driver)
    triton_compat.start_driver(KernelFolder(tmp_path / "ours"))
    assert asked == ["_Files"]
    driver.set_active(NoGpu())
    triton_compat.start_driver(KernelFolder(tmp_path / "ours"))
    assert len(asked) == 1


def test_the_platform_key_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own function, which starts a process, is restored after the block."""
    from triton.runtime import build

    theirs, architecture = build.platform_key, platform.architecture
    asked: list[object] = []

    def counted(*args: Any) -> tuple[str, str]:
        asked.append(args)
        return architecture(*args)

    monkeypatch.setattr(platform, "architecture", counted)
    found = set()
    for _ in range(3):
        with KernelFolder(tmp_path).used():
            found.add(build.platform_key())
    assert len(asked) <= 1 and build.platform_key is theirs
    assert found == {theirs()}


LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(KERNEL); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""
"""The source of a launcher as Triton 3.6 writes it, except that it returns a number instead of launching a kernel."""


def test_a_launcher_stays_that_of_its_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python returns another launcher's module where one is loaded again, as for a second kernel of a signature."""
    files = []
    for kernel in (1, 2):
        folder = tmp_path / str(kernel)
        folder.mkdir()
        (folder / "launcher.c").write_text(LAUNCHER.replace("KERNEL", str(kernel)))
        files.append(str(folder / "__triton_launcher.so"))
        command = ["cc", "-shared", "-fPIC", f"-I{sysconfig.get_paths()['include']}", str(folder / "launcher.c")]
        subprocess.run([*command, "-o", files[-1]], check=True)

    def launched() -> list[int]:
        modules = [build._load_module_from_path("__triton_launcher", files[number]) for number in (0, 1, 0, 1)]
        return [module.launch() for module in modules]

    monkeypatch.setattr(nvidia, "make_launcher", object(), raising=False)
    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path)
    assert launched() == [1, 2, 2, 2], "Python's modules are no longer shared: take this out"
    for _ in range(2):
        triton_compat.give_each_launcher_a_module()
    assert launched() == [1, 2, 1, 2]


def test_triton_that_makes_no_launchers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nvidia, "make_launcher", raising=False)
    load = build._load_module_from_path
    triton_compat.give_each_launcher_a_module()
    assert build._load_module_from_path is load
