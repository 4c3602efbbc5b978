"""The private parts of Triton that key, compile, store and load kernels; no other file uses them.

It holds for Triton 3.6 (torch 2.11) and 3.9 (torch 2.13). They differ here in one thing: 3.6 has a C compiler make a
module for each signature of a kernel when it is first launched, which 3.9 does not need.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import ASTSource, CompiledKernel, make_backend
from triton.compiler.compiler import compile as compile_with_triton
from triton.runtime import build, driver
from triton.runtime.cache import FileCacheManager

from piecegraph.passes.kernels.common.own_kernel import hash_functions_called

LIBRARY = ".so"

_TOOLS = ("ptxas", "ptxas_blackwell")
_FOLLOWS_THE_CODE = ("always_compile", "override", "dump_ir", "use_ir_loc")
"""Triton's settings for inspecting its compiler."""


def has_debug_hooks() -> bool:
    """Return whether Triton is set to dump, override or inspect kernels, in which case kernels are not replaced."""
    looks = any(getattr(knobs.compilation, name) for name in _FOLLOWS_THE_CODE)
    return looks or getattr(knobs.runtime, "add_stages_inspection_hook", None) is not None


def fingerprint(src: Any, target: Any, options: Mapping[str, Any]) -> str:
    """Return the sha256 of everything that determines `triton.compile(src, target=target, options=options)`.

    Triton itself is not included: its build is in the key of the cache entry that holds the kernel. The parts are those
    of Triton's own key: the source of the function, of the functions that it calls and of the constants that it reads,
    the signature, the values of constants, the specialisation of arguments, the options (the architecture, and
    libraries by content), and the variables that Triton declares relevant. Triton's digest of its own files and of
    ptxas takes most of a second; its other settings and the choice of ptxas take its place.
    """
    backend = make_backend(target)
    parsed = backend.parse_options({**options, **src.parse_options()})
    parts = [
        f"{src.fn.__module__}.{src.name}",
        src.hash(),
        str(target),
        parsed.hash(),
        _ptxas(backend) if target.backend == "cuda" else backend.hash(),
        sorted(get_cache_invalidating_env_vars().items()),
        _settings(),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def take_torchs_ptxas() -> None:
    """Make Triton use the ptxas that torch ships, if torch ships one, from now on.

    torch does the same when it first loads or compiles a kernel of Inductor. Without this call, a kernel compiled
    before that would have another fingerprint in the next start, where Inductor's kernels are loaded first.
    """
    from torch._inductor.runtime import compile_tasks

    compile_tasks._set_triton_ptxas_path()


def _ptxas(backend: Any) -> str:
    """Return which ptxas compiles: "" for Triton's, "torch" for torch's, otherwise its version.

    The builds of Triton and torch are in the key of the entry. Finding a version starts a process.
    """
    chosen = [path for path in map(_path_of, _TOOLS) if path is not None]
    if not chosen:
        return ""
    if all(path.is_relative_to(_TORCH) for path in chosen):
        return "torch"
    version: str = backend.hash()
    return version


_TORCH = Path(torch.__file__).parent


def _path_of(tool: str) -> Path | None:
    """Return the configured path of a tool; None if Triton uses its own."""
    if tool in vars(knobs.nvidia):
        return Path(getattr(getattr(knobs.nvidia, tool), "path", ""))
    configured = knobs.getenv(vars(type(knobs.nvidia))[tool].key)
    return None if configured is None else Path(configured)


def _settings() -> list[tuple[str, str]]:
    """Return Triton's settings that differ from the defaults, without paths: files are in the key by their content."""
    found = []
    for group in (knobs.compilation, knobs.language, knobs.nvidia):
        for name, knob in vars(type(group)).items():
            if isinstance(knob, knobs.env_base) and name not in _TOOLS and not name.endswith("_path"):
                text = str(vars(group)[name]) if name in vars(group) else knobs.getenv(knob.key)
                if text is not None:
                    found.append((name, text))
    return sorted(found)


class KernelFolder:
    """A folder in which Triton stores files of kernels inside a `used` block, instead of in its own cache.

    `libraries` holds the known modules of launchers, by path in the folder. A known module that Triton looks for is
    written to the folder; a module that Triton makes is added.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.libraries: dict[str, bytes] = {}

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Use the folder in this thread inside this block; other threads keep using Triton's own cache."""
        with _our_manager_is_set():
            token = _folder_of_thread.set(self)
            try:
                yield
            finally:
                _folder_of_thread.reset(token)


class _Files(FileCacheManager):  # type: ignore[misc]  # untyped
    """The cache manager for the files of one kernel or one library in a `KernelFolder`."""

    def __init__(self, key: str, folder: KernelFolder) -> None:
        self.key = key
        self._folder = folder
        self.cache_dir = str(folder.path / key)
        self.lock_path = os.path.join(self.cache_dir, "lock")
        os.makedirs(self.cache_dir, exist_ok=True)

    def get_file(self, filename: str) -> str | None:
        known = self._folder.libraries.get(f"{self.key}/{filename}")
        if known is not None and not self.has_file(filename):
            super().put(known, filename)
        found: str | None = super().get_file(filename)
        if known is None and found is not None and filename.endswith(LIBRARY):  # another process made it in this folder
            self._folder.libraries[f"{self.key}/{filename}"] = Path(found).read_bytes()
        return found

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        path: str = super().put(data, filename, binary)
        if filename.endswith(LIBRARY):
            self._folder.libraries[f"{self.key}/{filename}"] = bytes(data)
        return path


_folder_of_thread: ContextVar[KernelFolder | None] = ContextVar("folder_of_thread", default=None)
_lock = threading.Lock()
_blocks = 0  # open `used` blocks of all threads
_before: tuple[Any, ...] = ()  # the manager of `knobs.cache` before the first block, if one was set


def _manager(key: str, **how: Any) -> Any:
    """Make a cache manager: ours in a thread inside a `used` block, otherwise the one that Triton would make."""
    folder = _folder_of_thread.get()
    if folder is not None and not how:
        return _Files(key, folder)
    chosen = _before[0] if _before else vars(type(knobs.cache))["manager_class"].get()
    return (chosen or FileCacheManager)(key, **how)


_platform_key = functools.cache(build.platform_key)
"""The key of the machine, computed once. Triton computes it anew for each library that it looks for, with a process
that reads Python's binary: one process per kernel of a start."""


@contextlib.contextmanager
def _our_manager_is_set() -> Iterator[None]:
    """Make Triton call `_manager` and `_platform_key` inside this block; the end of the last open block undoes it.

    The settings are written to the instance dictionary, because the descriptors would also write the environment.
    """
    global _blocks, _before
    settings = vars(knobs.cache)
    with _lock:
        if _blocks == 0:
            _before = (settings["manager_class"],) if "manager_class" in settings else ()
            settings["manager_class"] = _manager
            build.platform_key = _platform_key
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0 and build.platform_key is _platform_key:
                build.platform_key = _platform_key.__wrapped__
            if _blocks == 0 and settings.get("manager_class") is _manager:
                del settings["manager_class"]
                if _before:
                    settings["manager_class"] = _before[0]


_module_lock = threading.Lock()


def give_each_launcher_a_module() -> None:
    """Make Triton 3.6 return a module of its own for each launcher that it loads, from now on. Idempotent.

    The modules of all launchers have one name, and no state of their own. Where Python loads such a file again, which
    kernels of one signature share, it returns the module that it returned last, with the functions of that file
    instead. A thread that loads a launcher between another's load and its look for `launch` gave a kernel the launcher
    of another kernel: an error about the number of arguments, or, if that is equal, arguments in wrong places.
    """
    if not hasattr(nvidia, "make_launcher") or hasattr(build._load_module_from_path, "__wrapped__"):
        return
    load = build._load_module_from_path

    @functools.wraps(load)
    def load_alone(name: str, path: str) -> Any:
        with _module_lock:
            return types.SimpleNamespace(**vars(load(name, path)))

    build._load_module_from_path = load_alone


class StoredKernel(CompiledKernel):  # type: ignore[misc]  # untyped
    """A compiled kernel whose launcher is loaded from a folder, or written to it."""

    def __init__(self, src: Any, paths: Mapping[str, str], folder: KernelFolder) -> None:
        """Load a kernel from `paths`, its files by name. Raises what Triton raises for files of other content."""
        self.module = None  # read by the destructor even if this constructor fails
        (metadata,) = (path for name, path in paths.items() if name.endswith(".json"))
        super().__init__(src, dict(paths), json.loads(Path(metadata).read_text())["hash"])
        self._launcher_folder = folder

    def _init_handles(self) -> None:
        with self._launcher_folder.used():
            super()._init_handles()


def files_of(kernel: Any) -> dict[str, bytes]:
    """Return the files that loading a compiled kernel needs, by name: its metadata and its binary."""
    wanted = (".json", f".{make_backend(kernel.metadata.target).binary_ext}")
    return {name: Path(path).read_bytes() for name, path in kernel.metadata_group.items() if name.endswith(wanted)}


def to_kernel_spec(src: Any, target: Any, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a kernel as JSON data for `compile_kernel_spec` in another process; None if that is impossible."""
    function = src.fn
    module = sys.modules.get(function.__module__)
    if getattr(module, src.name, None) is not function:
        return None
    spec = {
        "module": function.__module__,
        "name": src.name,
        "signature": dict(src.signature),
        "constants": [[list(place), value] for place, value in src.constants.items()],
        "attributes": [[list(place), value] for place, value in src.attrs.items()],
        "target": [target.backend, target.arch, target.warp_size],
        "options": dict(options),
        "fingerprint": fingerprint(src, target, options),
    }
    try:
        return spec if _with_tuples(json.loads(json.dumps(spec))) == _with_tuples(spec) else None
    except (TypeError, ValueError):
        return None


def compile_kernel_spec(spec: Mapping[str, Any], folder: KernelFolder) -> dict[str, str]:
    """Compile the kernel of a spec from `to_kernel_spec`; return the paths of its files in `folder`, by name.

    The module of its launcher is added to `folder.libraries` where this version of Triton makes one. Raises what Triton
    raises, and ValueError where the source or the settings in this process would give another kernel.
    """
    spec = _with_tuples(spec)
    function = getattr(importlib.import_module(spec["module"]), spec["name"])
    hash_functions_called(function)
    source = ASTSource(
        function,
        dict(spec["signature"]),
        constexprs=dict(spec["constants"]),
        attrs={place: [list(each) for each in value] for place, value in spec["attributes"]},
    )
    target, options = GPUTarget(*spec["target"]), dict(spec["options"])
    if spec["fingerprint"] not in (None, fingerprint(source, target, options)):
        raise ValueError(f"{spec['name']} has another source or other settings in this process")
    with folder.used():
        made = compile_with_triton(source, target=target, options=options)
        if hasattr(nvidia, "make_launcher"):
            with contextlib.suppress(Exception):  # it fails again, and is reported, where the kernel is loaded
                nvidia.CudaLauncher(source, made.metadata)
    return {name: str(path) for name, path in made.metadata_group.items() if name in files_of(made)}


def _with_tuples(value: Any) -> Any:
    """Return `value` with each list replaced by a tuple, because JSON has only lists."""
    if isinstance(value, dict):
        return {name: _with_tuples(each) for name, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list | tuple) else value


def make_driver(folder: KernelFolder) -> None:
    """Build the C module of Triton's driver and add it to `folder.libraries`, without starting the driver.

    A process that uses no GPU can do this. Raises what Triton raises without a C compiler or without CUDA.
    """
    with folder.used():
        nvidia.CudaUtils()


def has_driver() -> bool:
    """Return whether Triton's driver has started."""
    return driver._default is not None or driver._active is not None


def start_driver(folder: KernelFolder) -> None:
    """Start Triton's driver if it has not started; its C module is looked for in `folder`.

    An error is suppressed: it occurs again, and is reported, at the first launch of a kernel.
    """
    if not has_driver():
        with contextlib.suppress(Exception), folder.used():
            driver.active  # noqa: B018  # the first read makes the driver
