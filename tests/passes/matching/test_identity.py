"""Passes are identified by class, source and options."""

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

from piecegraph.passes.matching import identity
from piecegraph.passes.matching.graph_pass import GraphPass, PassContext, PassResult
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
from piecegraph.passes.matching.graph_pass import GraphPass, PassResult

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


def uuids_in_another_process(*folders: Path) -> list[str]:
    """Return the uuid of the class in each folder; torch is imported once for all of them."""
    code = """
import os, sys
import piecegraph.passes.matching.graph_pass
for folder in sys.argv[1:]:
    if os.fork() == 0:
        sys.path.insert(0, folder)
        import mine
        print(mine.Mine().uuid(), flush=True)
        os._exit(0)
    os.wait()
"""
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code, *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()


def folder_of(folder: Path, source: str, words: str) -> Path:
    folder.mkdir()
    (folder / "mine.py").write_text(source)
    (folder / "words_of_mine.py").write_text(words)
    return folder


def test_source_is_part_of_it_and_the_process_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process with the same files has the same; one line more, in the class's file or in one that it
    names in `reads`, is another pass."""
    first = folder_of(tmp_path / "first", SOURCE, "A = 1\n")
    second = folder_of(tmp_path / "second", SOURCE, "A = 1\n")
    other_words = folder_of(tmp_path / "other_words", SOURCE, "A = 2\n")
    other_source = folder_of(tmp_path / "other_source", SOURCE + "\n# another\n", "A = 1\n")
    monkeypatch.syspath_prepend(str(first))
    mine: Any = importlib.import_module("mine")
    here = mine.Mine().uuid()
    same, with_other_words, with_other_source = uuids_in_another_process(second, other_words, other_source)
    assert same == here
    assert len({here, with_other_words, with_other_source}) == 3


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


def test_a_pass_of_ours_depends_on_all_sources_of_passes() -> None:
    """Passes share patterns, ops and kernels: a change in any of these is another pass."""
    source = identity._source_of_ours()
    assert all(f"{name}\n" in source for name in ("pipeline.py", "ops/linear.py", "kernels/common/own_kernel.py"))
