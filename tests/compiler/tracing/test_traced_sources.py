"""Digests of sources by module: found, compared, and refused where they could not be compared again."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from piecegraph.compiler.common.call_targets import NotStorable
from piecegraph.compiler.tracing.traced_sources import (
    digests_by_module,
    digests_of_files,
    files_of_code,
    find_changed_module,
)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "some_source.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "some_source", raising=False)
    return importlib.import_module("some_source")


def test_a_file_is_identified_by_its_module(module: Any) -> None:
    found = digests_by_module(digests_of_files([module.__file__, __file__]))
    assert set(found) == {"some_source", __name__}
    assert find_changed_module(found) is None


def test_a_changed_file_is_noticed_before_and_after_it_is_stored(module: Any) -> None:
    digests = digests_of_files([module.__file__])
    stored = digests_by_module(digests)
    Path(module.__file__).write_text("A = 2\n")
    with pytest.raises(NotStorable, match=r"some_source\.py changed while it was compiled"):
        digests_by_module(digests)
    assert find_changed_module(stored) == "some_source"


def test_a_module_that_is_not_imported_is_looked_for(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = digests_by_module(digests_of_files([module.__file__]))
    monkeypatch.delitem(sys.modules, "some_source")
    assert find_changed_module(stored) is None
    assert find_changed_module({"no_such_module": "0"}) == "no_such_module"
    assert find_changed_module({"no_such.module": "0"}) == "no_such.module"


@pytest.mark.parametrize("file", ["<stdin>", "<ipython-input-3>", "/nonexistent.py"])
def test_a_file_of_no_module_cannot_be_stored(file: str) -> None:
    with pytest.raises(NotStorable, match="not a source file of an imported module"):
        digests_by_module(digests_of_files([file]))


@dataclass
class Written:
    value: int


def test_methods_generated_by_dataclasses_are_left_out() -> None:
    """Code that is part of the interpreter is left out too; text that was exec'ed is not."""
    made: dict[str, Any] = {}
    exec(compile("def f(): pass", "<string>", "exec"), made)
    frozen = compile("1", "<frozen abc>", "eval")
    codes = [Written.__init__.__code__, files_of_code.__code__, frozen]
    assert files_of_code(codes) == {files_of_code.__code__.co_filename}
    assert files_of_code([made["f"].__code__]) == {"<string>"}
