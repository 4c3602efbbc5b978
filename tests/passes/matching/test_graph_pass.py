"""The pass that docs/writing_a_pass.md shows works as it says, and bad ones are refused when they are given."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import fx

import piecegraph as pg
from piecegraph.errors import ConfigError
from piecegraph.passes.matching.graph_pass import GraphPass, PassContext, PassResult

PAGE = Path(__file__).parents[3] / "docs" / "writing_a_pass.md"


@dataclass(frozen=True)
class Mine(GraphPass):
    name: ClassVar[str] = "mine"
    sizes: Any = ()

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        return PassResult()


class NotFrozen(Mine):
    name: ClassVar[str] = "merge-projections"


@dataclass(unsafe_hash=True)
class Plain:
    name: str = "plain"
    place: str = "traced"
    uuid: str = ""
    apply: Any = field(default=None)


def test_the_example_in_the_documentation_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    script = tmp_path / "example_of_the_page.py"
    script.write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module(script.stem)
    del sys.modules[script.stem]
    printed = capsys.readouterr().out
    assert printed.startswith("fuse-silu 1 [('it is not multiplied by what it is the sigmoid of', '")
    line = "return x * torch.sigmoid(x) + torch.sigmoid(x + 1)"
    number = 1 + [text.strip() for text in code.splitlines()].index(line)
    assert f"{script}:{number} ({line})" in printed


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ((Mine,), r"passes has the class Mine; give an object of it: Mine\(\)"),
        ((len,), "passes has <built-in function len>, which has no name; give names"),
        ((NotFrozen(),), "whose name 'merge-projections' is one of ours"),
        ((Plain(),), "which is not a frozen dataclass; put @dataclass"),
        ((Mine(sizes=[1]),), "which is not hashable"),
        ((Mine(), Mine(sizes=(1,))), "passes has 'mine' twice"),
        (("merge-projections", "merge-projections"), "passes has 'merge-projections' twice"),
        (Mine(), r"passes is Mine\(sizes=\(\)\); give a tuple"),
    ],
)
def test_an_object_that_is_not_a_pass_is_refused(passes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pg.CompileConfig(passes=passes)


@pytest.mark.parametrize(
    ("expect", "message"),
    [
        ({"mine": -1}, "expect has 'mine': -1; give a number of matches, 0 or more, or 'all'"),
        ({"mine": True}, "expect has 'mine': True"),
        ({"mine": "some"}, "expect has 'mine': 'some'"),
        ({"mien": 1}, r"expect has 'mien', which is not among the passes\. Did you mean 'mine'\?"),
        ({"merge-projections": 1}, "which is not among the passes"),
        ("all", "expect is 'all'; give a mapping"),
    ],
)
def test_expectations_that_mean_nothing_are_refused(expect: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pg.CompileConfig(passes=(Mine(),), expect=expect)
    assert pg.CompileConfig(passes=(Mine(),), expect={"mine": 0}).expect == {"mine": 0}
