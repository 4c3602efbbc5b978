"""What tells passes apart: class, source, options."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from torch import fx

from piecegraph.passes.graph_pass import GraphPass, PassContext, PassResult
from piecegraph.passes.identity import pipeline_key
from piecegraph.passes.merge_projections import MergeProjections


@dataclass(frozen=True)
class Nothing(GraphPass):
    name: ClassVar[str] = "nothing"
    times: int = 1
    kinds: tuple[str, ...] = ()

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        return PassResult()


@dataclass(frozen=True)
class Nothing2(Nothing):
    pass


SOURCE = """
from dataclasses import dataclass
from typing import ClassVar
from piecegraph.passes.graph_pass import GraphPass, PassResult

@dataclass(frozen=True)
class Mine(GraphPass):
    name: ClassVar[str] = "mine"
    reads: ClassVar[tuple[str, ...]] = ("words_of_mine",)
    times: int = 1

    def apply(self, graph, context):
        return PassResult()
"""


def test_options_and_class_are_part_of_it() -> None:
    passes = [Nothing(), Nothing(times=2), Nothing(kinds=("a",)), Nothing2(), MergeProjections()]
    assert len({each.uuid() for each in passes}) == len(passes)
    assert Nothing(times=2).uuid() == Nothing(times=2).uuid()


def test_order_is_part_of_a_pipeline() -> None:
    one, other = Nothing(), Nothing2()
    assert pipeline_key([one, other]) == pipeline_key([Nothing(), Nothing2()])
    assert len({pipeline_key(each) for each in ([], [one], [one, other], [other, one])}) == 4


def uuid_in_a_fresh_process(folder: Path) -> str:
    code = "import mine; print(mine.Mine().uuid())"
    environment = {"PYTHONPATH": ":".join([str(folder), *filter(None, sys.path)]), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout.strip()


def test_source_is_part_of_it_and_the_process_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process with the same files has the same; one line more, in the class's file or in one that it
    names in `reads`, is another pass."""
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "words_of_mine.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine: Any = importlib.import_module("mine")
    here = mine.Mine().uuid()
    assert uuid_in_a_fresh_process(tmp_path) == here
    (tmp_path / "words_of_mine.py").write_text("A = 2\n")
    with_other_words = uuid_in_a_fresh_process(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE + "\n# another\n")
    assert len({here, with_other_words, uuid_in_a_fresh_process(tmp_path)}) == 3


def test_a_class_without_a_file_is_itself_in_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCE.replace("words_of_mine", "sys")
    typed = ModuleType("typed")
    monkeypatch.setitem(sys.modules, "typed", typed)
    exec(source, typed.__dict__)
    here: Any = typed.Mine
    assert here().uuid() == here().uuid()
    code = f"""
import sys, types
typed = sys.modules["typed"] = types.ModuleType("typed")
exec({source!r}, typed.__dict__)
print(typed.Mine().uuid())
"""
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert len(elsewhere) == 64
    assert elsewhere != here().uuid()
