"""Kernels of this package (`passes/kernels/own_kernel.py`), loaded from the cache instead of compiled at first launch.

A start names the model whose kernels these are (`OwnKernels.begin`), and what is kept for it is read: one entry,
authenticated before anything else is done with it (`kernel_store.py`). From then on Triton, where it would compile a
kernel of ours, asks here. One that is known is written to a folder of this process's own and loaded from there; any
other is compiled in that folder (`triton_compat.KernelFolder`), never in Triton's cache, from which nothing of ours is
read either. What was compiled is added to the entry at the end of a compile, of a capture and of the process, and
`KEEP_AFTER_S` after anything else (`keep`); who is killed before loses a compile.

There is one of these a process, as Triton has one compiled kernel a process, whichever model asked first: what is
kept for a model is what the process has used when it is kept. What is compiled belongs to the model that began last.

Kernels that are not ours are Triton's business alone; so are ours until a model with a cache begins, and those that a
cache lacks to which nothing can be added: they would be compiled anew in each process.
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

from piecegraph.compiler.early_processes import early_processes
from piecegraph.compiler.piece import UniquePiece
from piecegraph.compiler.private_folder import private_folder
from piecegraph.compiler.report import CompileReport
from piecegraph.compiler.stored.compile_cache import CompileCache
from piecegraph.compiler.stored.kernel_pack import KernelFiles
from piecegraph.compiler.stored.kernel_store import KernelStore, graphs_key
from piecegraph.passes.kernels.own_kernel import compile_with, refuse_to_compile

if TYPE_CHECKING:
    from piecegraph.compiler.kernel_processes import KernelProcesses
    from piecegraph.compiler.triton_compat import KernelFolder

logger = logging.getLogger(__name__)

KEEP_AFTER_S = 20.0
"""After the first of several kernels that a request is the first to need: they are saved together."""


@dataclass(slots=True)
class KernelUse:
    """What became of kernels since a start began, and until the next one."""

    cache: CompileCache
    of: str
    store: KernelStore
    loaded: int = 0
    compiled: int = 0
    unsaved_seconds: float = 0.0  # that compiling took, in all threads together, since kernels were last kept
    not_stored: str = ""  # why what was compiled is not kept
    has_new: bool = False  # a kernel that is used and not kept
    num_libraries: int = 0  # that were known when kernels were last kept


class OwnKernels:
    """Whose kernels are compiled now, and all that is known of any. Threads may compile at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._folder: KernelFolder | None = None
        self._known: dict[str, Mapping[str, bytes]] = {}  # files by fingerprint
        self._used: set[str] = set()  # fingerprints of those that this process has in use
        self._use: KernelUse | None = None
        self._uses: dict[str, KernelUse] = {}  # of each model, its last
        self._pid = os.getpid()
        self._timer: threading.Timer | None = None  # until what was compiled is kept
        self.processes: KernelProcesses | None = None  # of the start at hand, which compile in place of this one

    def begin(self, cache: CompileCache, of: str, device: torch.device) -> KernelUse | None:
        """Load what is kept for `of` (a plan's key, or `graphs_key`), and keep for it what is compiled from now on.

        None where there are no kernels of ours (a CPU, no Triton), no cache, no folder to load from, or a Triton whose
        parts are not where we know them: then all is as before.
        """
        if device.type == "cpu" or find_spec("triton") is None:
            return None
        if cache.store is None:
            with self._lock:
                self.keep()
                self._use = None  # what is compiled from now on is of no model with a cache
            return None
        try:
            from piecegraph.compiler import triton_compat
        except ImportError as error:
            logger.warning("kernels of ours are not kept in the cache: this Triton is not one we know (%s)", error)
            return None
        with self._lock:
            self.keep()
            if self._folder is None:
                try:
                    self._folder = triton_compat.KernelFolder(private_folder("kernels"))
                except OSError as error:
                    logger.warning("kernels of ours are not kept in the cache: no folder to load them from (%s)", error)
                    return None
                atexit.register(self._keep_at_exit)
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
        if found.libraries or not store.is_only_read:  # else its module would be compiled in every process
            if self.processes is not None and not found.libraries and not triton_compat.has_driver():
                self._folder.libraries |= self.processes.driver()
            triton_compat.start_driver(self._folder)
        return self._use

    def begin_without_plan(self, cache: CompileCache, pieces: Sequence[UniquePiece], device: torch.device) -> None:
        """As `begin`, for the graphs of these pieces; nothing where the start whose cache this is has begun."""
        if self._use is None or self._use.cache is not cache:
            self.begin(cache, graphs_key(piece.key for piece in pieces), device)

    def told_in(self, report: CompileReport) -> CompileReport:
        """`report` with how many kernels its model has had loaded and compiled by now."""
        use = self._uses.get(report.cache.key or graphs_key(row.key for row in report.unique_pieces))
        if use is None:
            return report
        not_stored = report.cache.not_stored or (f"kernels: {use.not_stored}" if use.not_stored else "")
        cache = replace(report.cache, loaded_kernels=use.loaded, compiled_kernels=use.compiled, not_stored=not_stored)
        return replace(report, cache=cache)

    def compile(self, plain: Any, src: Any, **how: Any) -> Any:
        """A compiled kernel, as `plain(src, **how)` (`triton.compile`) gives it, which is called where it is not known.

        Raises as `plain`, and `NotKept` instead of compiling inside `loading_only`.
        """
        from piecegraph.compiler import triton_compat

        use, folder = self._use, self._folder
        if use is None or folder is None or triton_compat.is_looked_into():
            refuse_to_compile(src)
            return plain(src, **how)
        key = triton_compat.fingerprint(src, how["target"], how["options"])
        known = self._known.get(key)
        if known is not None:
            try:
                kernel = triton_compat.StoredKernel(src, _written(folder.path, known), folder)
            except Exception as error:  # whatever Triton makes of files that are not what it wrote
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
            files = self._compiled_elsewhere(src, how)
            if files is None:
                with folder.used():
                    made = plain(src, **how)
                files, paths = triton_compat.files_of(made), made.metadata_group
            else:
                paths = _written(folder.path, files)
        except OSError as error:  # the disk our folder is on; Triton's cache may be on another
            logger.warning("kernel %s is not kept in the cache (%s)", src.name, error)
            return plain(src, **how)
        seconds = time.perf_counter() - began
        with self._lock:
            use = self._use or use  # another model may have begun meanwhile: what it keeps is kept next
            self._known[key] = files
            self._used.add(key)
            use.compiled += 1
            use.unsaved_seconds += seconds
            use.has_new = True
            if self._timer is None or not self._timer.is_alive():
                self._timer = threading.Timer(KEEP_AFTER_S, self.keep)
                self._timer.daemon = True
                self._timer.start()
        return triton_compat.StoredKernel(src, paths, folder)

    def _compiled_elsewhere(self, src: Any, how: Mapping[str, Any]) -> Mapping[str, bytes] | None:
        """The files of a kernel, by one of the processes that the start has for that; modules of launchers that it made
        are in our folder then. None: there are no processes, or none for this one."""
        from piecegraph.compiler import triton_compat

        if self.processes is None or set(how) - {"target", "options"}:
            return None
        said = triton_compat.said_of(src, how["target"], how["options"])
        made = None if said is None else self.processes.compile(said)
        if said is None or made is None:
            return None
        with self._lock:
            if self._folder is not None:
                self._folder.libraries |= made.libraries
        return made.kernels[said["fingerprint"]]

    def keep(self) -> str:
        """Save what was compiled since the last time; why not, or nothing. Never raises for what a disk says."""
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

    def _keep_at_exit(self) -> None:
        if os.getpid() == self._pid:  # and not in one forked from it
            self.keep()


def _written(root: Path, files: Mapping[str, bytes]) -> dict[str, str]:
    """Paths by name of `files`, which are in a new folder below `root` now: no other thread writes there."""
    folder = Path(tempfile.mkdtemp(dir=root))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {name: str(folder / name) for name in files}


OWN_KERNELS = OwnKernels()
"""This process's."""
