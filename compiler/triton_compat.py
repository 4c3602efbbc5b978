"""What is private to Triton of how kernels are keyed, compiled, kept in files and loaded: no other file knows it.

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

from piecegraph.passes.kernels.own_kernel import hash_functions_called

LIBRARY = ".so"

_TOOLS = ("ptxas", "ptxas_blackwell")
_FOLLOWS_THE_CODE = ("always_compile", "override", "dump_ir", "use_ir_loc")
"""Settings of those who look into Triton's compiler."""


def is_looked_into() -> bool:
    """Whether somebody has Triton dump, override or inspect what it compiles: then nothing stands between."""
    looks = any(getattr(knobs.compilation, name) for name in _FOLLOWS_THE_CODE)
    return looks or getattr(knobs.runtime, "add_stages_inspection_hook", None) is not None


def fingerprint(src: Any, target: Any, options: Mapping[str, Any]) -> str:
    """sha256 of all that decides what `triton.compile(src, target=target, options=options)` makes, but for Triton
    itself, whose build is in the key of the entry that holds the kernel.

    These are the parts of Triton's own key: the function's source with that of functions it calls and constants it
    reads, signature, values of constants, what arguments are specialised on, options (the architecture, and libraries
    by their content), variables that Triton says matter. Instead of the digest over Triton's files and ptxas's version,
    which take most of a second to find out, there are Triton's other settings, and which ptxas it is.
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
    """Have Triton take the ptxas that torch comes with, if it comes with one, from now on.

    Torch does so when it first loads, or compiles, a kernel of Inductor's. What was compiled before would be compiled
    again in the next start, where Inductor's kernels are loaded first.
    """
    from torch._inductor.runtime import compile_tasks

    compile_tasks._set_triton_ptxas_path()


def _ptxas(backend: Any) -> str:
    """Which one compiles: nothing for Triton's own, "torch" for the one torch comes with, whose build is in the key of
    the entry; of any other its version, which a process has to be started for."""
    chosen = [path for path in map(_path_of, _TOOLS) if path is not None]
    if not chosen:
        return ""
    if all(path.is_relative_to(_TORCH) for path in chosen):
        return "torch"
    version: str = backend.hash()
    return version


_TORCH = Path(torch.__file__).parent


def _path_of(tool: str) -> Path | None:
    """Where a tool is taken from, if Triton was told; None: from Triton."""
    if tool in vars(knobs.nvidia):
        return Path(getattr(getattr(knobs.nvidia, tool), "path", ""))
    told = knobs.getenv(vars(type(knobs.nvidia))[tool].key)
    return None if told is None else Path(told)


def _settings() -> list[tuple[str, str]]:
    """Settings that are not as Triton comes. Paths are left out: what lies there is in the key by its content."""
    found = []
    for group in (knobs.compilation, knobs.language, knobs.nvidia):
        for name, knob in vars(type(group)).items():
            if isinstance(knob, knobs.env_base) and name not in _TOOLS and not name.endswith("_path"):
                text = str(vars(group)[name]) if name in vars(group) else knobs.getenv(knob.key)
                if text is not None:
                    found.append((name, text))
    return sorted(found)


class KernelFolder:
    """A folder that Triton keeps files of kernels in while `used`, in place of its own.

    `libraries`: modules its launchers are made of, by path in the folder, as far as they are known; those it looks for
    are written to the folder, and those it makes are added.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.libraries: dict[str, bytes] = {}

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """By this thread, inside this block. Others, and what they compile meanwhile, have Triton's cache."""
        with _asked_by_thread():
            token = _folder_of_thread.set(self)
            try:
                yield
            finally:
                _folder_of_thread.reset(token)


class _Files(FileCacheManager):  # type: ignore[misc]  # untyped
    """Files of one kernel, or of one library."""

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
        if known is None and found is not None and filename.endswith(LIBRARY):  # by another process in this folder
            self._folder.libraries[f"{self.key}/{filename}"] = Path(found).read_bytes()
        return found

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        path: str = super().put(data, filename, binary)
        if filename.endswith(LIBRARY):
            self._folder.libraries[f"{self.key}/{filename}"] = bytes(data)
        return path


_folder_of_thread: ContextVar[KernelFolder | None] = ContextVar("folder_of_thread", default=None)
_lock = threading.Lock()
_blocks = 0  # that are open, in all threads
_before: tuple[Any, ...] = ()  # what `knobs.cache` had as its manager when the first opened, if it had one


def _manager(key: str, **how: Any) -> Any:
    """What Triton makes while a block is open: ours in threads that are inside one, else what it would have made."""
    folder = _folder_of_thread.get()
    if folder is not None and not how:
        return _Files(key, folder)
    chosen = _before[0] if _before else vars(type(knobs.cache))["manager_class"].get()
    return (chosen or FileCacheManager)(key, **how)


_platform_key = functools.cache(build.platform_key)
"""Of the machine. Triton finds it out anew for each library that it looks for, by a process that looks at Python's
binary: of a start, one for each kernel."""


@contextlib.contextmanager
def _asked_by_thread() -> Iterator[None]:
    """Triton asks `_manager` and `_platform_key` inside; past the last such block its settings are as before. They are
    set past the descriptor, which would write them to the environment too."""
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


class StoredKernel(CompiledKernel):  # type: ignore[misc]  # untyped
    """A compiled kernel whose launcher comes from a folder, or goes there."""

    def __init__(self, src: Any, paths: Mapping[str, str], folder: KernelFolder) -> None:
        """`paths`: of its files, by name. Raises what Triton raises for files that are not a kernel's."""
        self.module = None  # asked for when it is dropped, however far this comes
        (metadata,) = (path for name, path in paths.items() if name.endswith(".json"))
        super().__init__(src, dict(paths), json.loads(Path(metadata).read_text())["hash"])
        self._launcher_folder = folder

    def _init_handles(self) -> None:
        with self._launcher_folder.used():
            super()._init_handles()


def files_of(kernel: Any) -> dict[str, bytes]:
    """What loading a compiled kernel needs, by name: what is known of it, and the binary."""
    wanted = (".json", f".{make_backend(kernel.metadata.target).binary_ext}")
    return {name: Path(path).read_bytes() for name, path in kernel.metadata_group.items() if name.endswith(wanted)}


def said_of(src: Any, target: Any, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What another process needs to compile a kernel (`compile_said`), as data; None where it cannot be said."""
    function = src.fn
    module = sys.modules.get(function.__module__)
    if getattr(module, src.name, None) is not function:
        return None
    said = {
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
        return said if _with_tuples(json.loads(json.dumps(said))) == _with_tuples(said) else None
    except (TypeError, ValueError):
        return None


def compile_said(said: Mapping[str, Any], folder: KernelFolder) -> dict[str, str]:
    """Paths in `folder` of the files of the kernel that `said_of` tells of, by name. The module of its launcher, where
    this Triton makes one, is among `folder.libraries` then.

    Raises what Triton raises, and ValueError where it would not be the same kernel here: of another source, or under
    other settings.
    """
    said = _with_tuples(said)
    function = getattr(importlib.import_module(said["module"]), said["name"])
    hash_functions_called(function)
    source = ASTSource(
        function,
        dict(said["signature"]),
        constexprs=dict(said["constants"]),
        attrs={place: [list(each) for each in value] for place, value in said["attributes"]},
    )
    target, options = GPUTarget(*said["target"]), dict(said["options"])
    if said["fingerprint"] not in (None, fingerprint(source, target, options)):
        raise ValueError(f"{said['name']} is another kernel, or compiled otherwise, in this process")
    with folder.used():
        made = compile_with_triton(source, target=target, options=options)
        if hasattr(nvidia, "make_launcher"):
            with contextlib.suppress(Exception):  # it fails again where the kernel is loaded, and is reported there
                nvidia.CudaLauncher(source, made.metadata)
    return {name: str(path) for name, path in made.metadata_group.items() if name in files_of(made)}


def _with_tuples(value: Any) -> Any:
    """With tuples for lists, as JSON knows lists alone."""
    if isinstance(value, dict):
        return {name: _with_tuples(each) for name, each in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list | tuple) else value


def make_driver(folder: KernelFolder) -> None:
    """Have the module in C that Triton's driver consists of made, which is among `folder.libraries` then, and start no
    driver: a process that has no GPU in use can. Raises what Triton raises where there is no compiler or no CUDA."""
    with folder.used():
        nvidia.CudaUtils()


def has_driver() -> bool:
    """Whether Triton's driver has begun."""
    return driver._default is not None or driver._active is not None


def start_driver(folder: KernelFolder) -> None:
    """Have Triton's driver begin, if it has not: the module in C that it consists of is then looked for in `folder`.

    Where that fails, it fails again at the first launch of a kernel, and is reported there.
    """
    if not has_driver():
        with contextlib.suppress(Exception), folder.used():
            driver.active  # noqa: B018  # made when it is first asked for
