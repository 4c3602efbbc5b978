"""What holds for every test."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import compiled_once, repeatable_draws


def pytest_configure(config: pytest.Config) -> None:
    """Tests have a cache of their own, kept from run to run, and of what is compiled pieces alone: most are about what
    a trace comes to. Generated C++ that was compiled is not compiled again.

    While tests are collected, bytecode is kept even where PYTHONDONTWRITEBYTECODE is set: hundreds of processes that
    tests start import the same files. Modules that tests write are not kept: their bytecode could be that of an earlier
    text of the same second.

    A background job of a shell starts with Ctrl-C ignored, and so would every process that tests start: those that
    are about it need it.
    """
    kept = config.rootpath / ".pytest_cache" / "piecegraph"
    os.environ.setdefault("PIECEGRAPH_CACHE", "pieces")
    os.environ.setdefault("PIECEGRAPH_CACHE_DIR", str(kept / "cache"))
    os.environ["XDG_DATA_HOME"] = str(kept / "data")  # where the key lies that signs
    compiled_once.install(kept / "c++")
    repeatable_draws.install()
    sys.dont_write_bytecode = False
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    count_frozen_objects_once()
    os.fsync = lambda fd: None  # no machine stops here: tests that are about syncs record the calls
    if (memory := memory_folder()) is not None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))  # where `tmp_path` lies


def count_frozen_objects_once() -> None:
    """Let `gc.get_freeze_count` remember a large count until objects are thawed.

    It walks over all that is frozen, a million objects here, and every load of a model and every capture asks it.
    """
    count, unfreeze = gc.get_freeze_count, gc.unfreeze
    large: list[int] = []

    def known_count() -> int:
        if not large:
            found = count()
            if found < 100_000:
                return found
            large.append(found)
        return large[0]

    def thaw() -> None:
        large.clear()
        unfreeze()

    gc.get_freeze_count, gc.unfreeze = known_count, thaw


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test draws the same in every run, whichever tests the process has run before; so do the fixtures that it is
    the first to use. Libraries that nobody has imported are left alone."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` notes the call for each kind of device


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage is looked for while hundreds of modules are imported: they stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))


def memory_folder() -> Path | None:
    """Return a folder in memory with room for the tests' files, from which libraries can be loaded; None without one.

    Thousands of small files are made, renamed and removed, which on a disk is most of what tests of the cache wait for.
    """
    folder = Path("/dev/shm")
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    has_room = status.f_bavail * status.f_frsize >= 4 << 30
    return folder if has_room and os.access(folder, os.W_OK) and not status.f_flag & os.ST_NOEXEC else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` keeps the files of some rooms together."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.shared_rooms import LoadRoomScheduling

    return LoadRoomScheduling(config, log)


FIRST = (
    "tests/test_paused_gc.py",  # it walks over all objects, and there are few yet
    "tests/compiler/graphs/test_capture.py",  # so does it, after each of many cycles
    "tests/runner/distributed/test_executor.py",
    "tests/runner/clusters/test_ray_executor.py",
    "tests/runner/test_warm_families.py",
    "tests/runner/test_tiny_shapes.py",
    "tests/tools/bench/test_perplexity.py",
    "tests/compiler/piece_compilers/test_compile_static.py",
    "tests/runner/inspect/test_selfcheck.py",
    "tests/tools/commands/test_compile.py",
    "tests/runner/engine/test_engine_states.py",
    "tests/runner/speculative/test_speculative_states.py",
    "tests/runner/test_smollm2.py",
    "tests/compiler/building/test_inductor_pieces.py",
    "tests/tools/cache/entries/test_proof.py",
    "tests/test_start_imports.py",
    "tests/compiler/test_load_or_compile.py",
    "tests/compiler/test_files_of_a_start.py",
    "tests/tools/bench/growth/test_growth.py",
    "tests/tools/serve/test_serve.py",
    "tests/tools/serve/endpoints/test_embeddings.py",
)
"""Files with long tests begin first, in this order, or one process would be left with one of them."""
PLACES = {file: place for place, file in enumerate(FIRST)}


@pytest.fixture(scope="session")
def models_are_traced_once() -> Iterator[None]:
    """From here on, models of one config with eager pieces share a trace. torch is imported only if a test asks."""
    from tests.runner.traced_once import shared_traces

    with shared_traces():
        yield


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_aside() -> None:
    """Collections of garbage, those of a capture too, do not walk over what other files have left in this process:
    after thousands of tests that is millions of objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def ends_in_time() -> Iterator[None]:
    """End this process, with the stacks of all threads, if a test of several GPUs hangs, which no exception ends. Ranks
    end with it. Three minutes are enough for the start of processes and a compile."""
    faulthandler.dump_traceback_later(180.0, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`FIRST`, then the others. Tests marked `gpu` are skipped where torch sees no GPU; torch is imported only if there
    are such tests."""
    items.sort(key=lambda item: PLACES.get(item.nodeid.partition("::")[0], len(FIRST)))
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no NVIDIA GPU"))
