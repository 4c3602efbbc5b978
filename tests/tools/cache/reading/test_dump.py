from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from piecegraph.errors import CacheError
from piecegraph.tools.cache.entries.contents import ContentFile, Kind
from piecegraph.tools.cache.reading.dump import decompiled, dump

SOURCE = "def forward(x):\n    y = piece_0(x)\n    del x\n    return (y,)\n"


def test_the_bytecode_of_the_stitched_module_as_depyf_reads_it(tmp_path: Path) -> None:
    """The source is compiled and not run: this one would not survive it."""
    pytest.importorskip("depyf")
    file = ContentFile("stitched.py", Kind.CODE, b"raise SystemExit\n" + SOURCE.encode())
    assert dump([file], tmp_path) == ["stitched.py", "stitched.decompiled.py"]
    view = (tmp_path / "stitched.decompiled.py").read_text()
    assert "def forward(x):" in view
    assert "piece_0(x)" in view


def test_without_depyf_there_is_no_such_view(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert decompiled(SOURCE) is None
    assert "depyf is not installed" in capsys.readouterr().err


def test_source_that_python_cannot_read_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("depyf")
    assert decompiled("def forward(:\n") is None
    assert "depyf cannot decompile the stitched module: SyntaxError" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="file/below cannot be written"):
        dump([], tmp_path / "file" / "below")
