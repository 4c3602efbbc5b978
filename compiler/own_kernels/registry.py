"""Kernels of this package (`own_kernel.py`), loaded from the cache instead of compiled at first launch.

A start names the model that the kernels belong to (`OwnKernels.begin`), and the model's cache entry is read and
authenticated (`store.py`). From then on Triton calls `OwnKernels.compile` where it would compile one of our kernels. A
known kernel is written to a private folder of this process and loaded from there; any other kernel is compiled in that
folder (`KernelFolder`). Triton's own cache is neither written nor read for our kernels. New kernels are added to the
entry at the end of a compile, of a capture and of the process, and `SAVE_AFTER_S` after a compile at any other time
(`save`); a process that is killed before loses them.

There is one registry per process, because Triton holds a compiled kernel once per process, whichever model launched it
first. The entry of a model gets the kernels that the process has used when it is saved; a new kernel belongs to the
model that began last.

Kernels that are not ours are left to Triton. So are our kernels until a model with a cache begins, and those missing in
a read-only cache.
"""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.compiler.common.private_folder import private_folder
from piecegraph.compiler.common.report import CompileReport
from piecegraph.compiler.own_kernels.store import KernelStore, graphs_key
from piecegraph.compiler.splitting.piece import UniquePiece
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.triton.kernel_pack import KernelFiles
from piecegraph.compiler.workers.prestart import early_processes
from piecegraph.passes.kernels.common.own_kernel import compile_with, refuse_to_compile

if TYPE_CHECKING:
    from piecegraph.compiler.triton.compat import KernelFolder
    from piecegraph.compiler.workers.kernel_processes import KernelProcesses

logger = logging.getLogger(__name__)

SAVE_AFTER_S = 20.0
"""Seconds from the first kernel that a request compiles to the save, so that several kernels are saved together."""


@dataclass(slots=True)
class KernelUse:
    """The counts of loaded and compiled kernels from the start of one model to the start of the next."""

    cache: CompileCache
    of: str
    store: KernelStore
    loaded: int = 0
    compiled: int = 0
    unsaved_seconds: float = 0.0  # of compiles, summed over threads, since the last save
    not_stored: str = ""  # why compiled kernels are not saved
    has_new: bool = False  # whether a used kernel is not saved
    num_libraries: int = 0  # known at the last save


class OwnKernels:
    """The registry of this process's own kernels, and the model that new kernels belong to. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._folder: KernelFolder | None = None
        self._known: dict[str, Mapping[str, bytes]] = {}  # files by fingerprint
        self._used: set[str] = set()  # fingerprints of kernels that this process has loaded
        self._use: KernelUse | None = None
        self._uses: dict[str, KernelUse] = {}  # the last use of each model
        self._pid = os.getpid()
        self._timer: threading.Timer | None = None  # runs `save` after a compile
        self.processes: KernelProcesses | None = None  # child processes of the current start, which compile kernels

    def begin(self, cache: CompileCache, of: str, device: torch.device) -> KernelUse | None:
        """Load the kernels saved for `of` (a plan's key, or `graphs_key`); kernels compiled from now on belong to it.

        Returns None, with nothing kept, on a CPU, without Triton, without a cache, without a folder to load from,
        and with a version of Triton whose private parts are unknown.
        """
        if device.type == "cpu" or find_spec("triton") is None:
            return None
        try:
            from piecegraph.compiler.triton import compat as triton_compat
        except ImportError as error:
            logger.warning(
                "our Triton kernels are not kept in the cache: this version of Triton is unknown (%s)", error
            )
            return None
        triton_compat.give_each_launcher_a_module()
        if cache.store is None:
            with self._lock:
                self.save()
                self._use = None  # kernels compiled from now on belong to no model with a cache
            return None
        with self._lock:
            self.save()
            if self._folder is None:
                try:
                    self._folder = triton_compat.KernelFolder(private_folder("kernels"))
                except OSError as error:
                    logger.warning(
                        "our Triton kernels are not kept in the cache: no folder to load them from (%s)", error
                    )
                    return None
                atexit.register(self._save_at_exit)
            store = KernelStore(cache, of, device)
            found = store.load()
            self._folder.libraries |= found.libraries
            self._known = {**found.kernels, **self._known}
            is_missing_some = not found.kernels and bool(self._used)
            self._use = KernelUse(cache, of, store, has_new=is_missing_some, num_libraries=len(self._folder.libraries))
            self._uses[of] = self._use
            early = early_processes()
            self.processes = None if early is None else early.kernels()
            triton_compat.take_torchs_ptxas()
            compile_with(self.compile)
        if found.libraries or not store.is_only_read:  # otherwise the driver module would be compiled in every process
            if self.processes is not None and not found.libraries and not triton_compat.has_driver():
                self._folder.libraries |= self.processes.driver()
            triton_compat.start_driver(self._folder)
        return self._use

    def begin_without_plan(self, cache: CompileCache, pieces: Sequence[UniquePiece], device: torch.device) -> None:
        """Call `begin` for the graphs of these pieces, unless the current start over this cache has called it."""
        if self._use is None or self._use.cache is not cache:
            self.begin(cache, graphs_key(piece.key for piece in pieces), device)

    def with_kernel_counts(self, report: CompileReport) -> CompileReport:
        """Return `report` with the numbers of kernels that its model has loaded and compiled so far."""
        use = self._uses.get(report.cache.key or graphs_key(row.key for row in report.unique_pieces))
        if use is None:
            return report
        not_stored = report.cache.not_stored or (f"kernels: {use.not_stored}" if use.not_stored else "")
        cache = replace(report.cache, loaded_kernels=use.loaded, compiled_kernels=use.compiled, not_stored=not_stored)
        return replace(report, cache=cache)

    def compile(self, plain: Any, src: Any, **how: Any) -> Any:
        """Return the kernel that `plain(src, **how)` (`triton.compile`) returns, loaded if it is known.

        Raises what `plain` raises, and `NotKept` instead of compiling inside `loading_only`.
        """
        from piecegraph.compiler.triton import compat as triton_compat

        use, folder = self._use, self._folder
        if use is None or folder is None or triton_compat.has_debug_hooks():
            refuse_to_compile(src)
            return plain(src, **how)
        key = triton_compat.fingerprint(src, how["target"], how["options"])
        known = self._known.get(key)
        if known is not None:
            try:
                kernel = triton_compat.StoredKernel(src, _written(folder.path, known), folder)
            except Exception as error:  # Triton may raise anything for damaged files
                logger.warning("kernel %s of the cache cannot be loaded (%s); compiling it again", src.name, error)
                use.store.reject(key)
            else:
                with self._lock:
                    self._used.add(key)
                    use.loaded += 1
                return kernel
        refuse_to_compile(src)
        if use.store.is_only_read:
            return plain(src, **how)
        began = time.perf_counter()
        try:
            files = self._compile_in_child(src, how)
            if files is None:
                with folder.used():
                    made = plain(src, **how)
                files, paths = triton_compat.files_of(made), made.metadata_group
            else:
                paths = _written(folder.path, files)
        except OSError as error:  # an error of our folder's disk; Triton's cache may be on another
            logger.warning("kernel %s is not kept in the cache (%s)", src.name, error)
            return plain(src, **how)
        seconds = time.perf_counter() - began
        with self._lock:
            use = self._use or use  # another model may have begun meanwhile, and saves next
            self._known[key] = files
            self._used.add(key)
            use.compiled += 1
            use.unsaved_seconds += seconds
            use.has_new = True
            if self._timer is None or not self._timer.is_alive():
                self._timer = threading.Timer(SAVE_AFTER_S, self.save)
                self._timer.daemon = True
                self._timer.start()
        return triton_compat.StoredKernel(src, paths, folder)

    def _compile_in_child(self, src: Any, how: Mapping[str, Any]) -> Mapping[str, bytes] | None:
        """Compile a kernel in a child process of the start and return its files; None if that is impossible.

        New modules of launchers are added to our folder.
        """
        from piecegraph.compiler.triton import compat as triton_compat

        if self.processes is None or set(how) - {"target", "options"}:
            return None
        spec = triton_compat.to_kernel_spec(src, how["target"], how["options"])
        made = None if spec is None else self.processes.compile(spec)
        if spec is None or made is None:
            return None
        with self._lock:
            if self._folder is not None:
                self._folder.libraries |= made.libraries
        return made.kernels[spec["fingerprint"]]

    def save(self) -> str:
        """Save kernels compiled since the last save; return why that failed, or "". Never raises for disk errors."""
        with self._lock:
            use = self._use
            if use is None or self._folder is None:
                return ""
            libraries = dict(self._folder.libraries)
            if not use.has_new and len(libraries) == use.num_libraries:
                return ""
            files = KernelFiles({key: self._known[key] for key in sorted(self._used)}, libraries)
            use.not_stored = use.store.save(files, self._used, use.unsaved_seconds)
            use.has_new, use.num_libraries, use.unsaved_seconds = False, len(libraries), 0.0
            return use.not_stored

    def _save_at_exit(self) -> None:
        if os.getpid() == self._pid:  # not in a forked process
            self.save()


def _written(root: Path, files: Mapping[str, bytes]) -> dict[str, str]:
    """Write `files` to a new folder below `root`, where no other thread writes; return their paths by name."""
    folder = Path(tempfile.mkdtemp(dir=root))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {name: str(folder / name) for name in files}


OWN_KERNELS = OwnKernels()
"""The registry of this process."""
