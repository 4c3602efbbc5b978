"""Folders of a process's own: nobody else's to read, and gone with it."""

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

from piecegraph.compiler.private_folder import _parent, private_folder


def test_each_is_new_and_nobody_elses() -> None:
    one, other = private_folder("piece"), private_folder("piece")
    assert one != other
    for folder in (one, one.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_where_no_code_may_run_they_lie_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A /tmp that is mounted noexec: libraries could not be loaded from it."""
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert _parent() == tmp_path / "cache"
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=0))
    assert _parent() == Path(tempfile.gettempdir())


def test_where_others_could_exchange_them_they_lie_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder for temporary files that all may write to, and in which all may rename what is not theirs."""
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    for mode, parent in ((0o777, tmp_path / "cache"), (0o775, tmp_path / "cache"), (0o1777, shared), (0o755, shared)):
        shared.chmod(mode)
        assert _parent() == parent


def test_what_a_killed_process_left_goes_with_the_next(tmp_path: Path) -> None:
    """What one that lives has stays, and so does what is not a process's folder."""
    code = """
import sys
from piecegraph.compiler.private_folder import private_folder
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


def test_they_go_with_the_process_and_not_with_one_it_forked() -> None:
    code = """
import os
from piecegraph.compiler.private_folder import private_folder
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
