"""Folders of a process's own: nobody else's to read, and gone with it."""

from __future__ import annotations

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
