"""Private folders: no other user can read them, and they are removed with their process."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from piecegraph.compiler.common.private_folder import _parent, _sweep, private_folder, scratch_folder, sweep_folders


def test_each_folder_is_new_and_readable_by_its_user_only() -> None:
    one, other = private_folder("piece"), private_folder("piece")
    assert one != other
    for folder in (one, one.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_under_a_noexec_tmp_folders_are_made_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries could not be loaded from a /tmp that is mounted noexec."""
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert _parent() == tmp_path / "cache"
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=0))
    assert _parent() == Path(tempfile.gettempdir())


def test_under_a_tmp_without_sticky_bit_folders_are_made_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a world-writable folder without the sticky bit every user may rename the files of others."""
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    for mode, parent in ((0o777, tmp_path / "cache"), (0o775, tmp_path / "cache"), (0o1777, shared), (0o755, shared)):
        shared.chmod(mode)
        assert _parent() == parent


def test_folders_of_a_killed_process_are_removed_by_the_next(tmp_path: Path) -> None:
    """Folders of living processes stay, and so do folders that are not of a process."""
    code = """
import sys
from piecegraph.compiler.common.private_folder import private_folder
print(private_folder("x"), flush=True)
sys.stdin.read()
"""
    other = tmp_path / "piecegraph-of-nobody"
    other.mkdir()

    def start() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    with contextlib.ExitStack() as ends:
        (killed, left), (living, kept) = start(), start()
        ends.callback(living.communicate)
        killed.kill()
        killed.communicate()
        assert left.is_dir()
        last, _ = start()
        ends.callback(last.communicate)
        assert not left.parent.exists()
        assert kept.is_dir()
        assert other.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == [other.name]


def test_folders_are_removed_by_their_process_and_not_by_a_forked_child() -> None:
    code = """
import os
from piecegraph.compiler.common.private_folder import private_folder
folder = private_folder("x")
child = os.fork()
if child == 0:
    raise SystemExit(0)
os.waitpid(child, 0)
assert folder.is_dir()
print(folder)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip())
    assert folder.is_absolute()
    assert not os.path.lexists(folder.parent)


def test_a_scratch_folder_is_removed_after_its_block() -> None:
    with scratch_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "graph.json").write_text("{}")
    assert not folder.exists()


def test_the_folder_of_a_process_killed_before_locking_is_removed(tmp_path: Path) -> None:
    """A recent folder may belong to a process that is just starting; a folder with other contents is not ours."""
    names: dict[str, list[str]] = {"old": [], "old-named": ["fresh"], "used": ["precious"], "new": []}
    for name, files in names.items():
        folder = tmp_path / f"piecegraph-of-{name}"
        folder.mkdir()
        for file in files:
            (folder / file).touch()
        if name != "new":
            os.utime(folder, (0, 0))
    (tmp_path / "piecegraph-of-link").symlink_to(tmp_path / "piecegraph-of-old")
    _sweep(tmp_path)
    left = {path.name.removeprefix("piecegraph-of-") for path in tmp_path.iterdir()}
    assert left == {"used", "new", "link"}


def test_a_start_sweeps_even_where_it_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start, with any compiler, removes the folders of a killed start."""
    import torch

    import piecegraph

    left = tmp_path / "piecegraph-of-killed"
    left.mkdir()
    (left / "held").touch()
    (left / "0-scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sweep_folders.cache_clear()
    config = piecegraph.CompileConfig(compiler="eager")
    compiled = piecegraph.compile(torch.nn.ReLU(), example_inputs=(torch.ones(2, 2),), config=config)
    assert compiled.report().num_pieces == 1
    assert not left.exists()
