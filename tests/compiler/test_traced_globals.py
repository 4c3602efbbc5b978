"""Globals that a trace read are told again, and a change of one is named."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from piecegraph.compiler.traced_globals import GlobalFact, changed_global, globals_read

SOURCE = """
EPS = 1e-5
FLAGS = (1, True, None)
TABLE = {"a": 1, "b.c": 2}

def scale(x, by=2.0):
    return x * by

class Kind:
    pass
"""


@dataclass
class Guard:
    """As much of Dynamo's as is looked at."""

    name: str
    value: Any
    has_value: bool = True


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "globals_here.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "globals_here", raising=False)
    return importlib.import_module("globals_here")


def facts(module: Any) -> tuple[GlobalFact, ...]:
    home = "G['__import_globals_here']"
    guards = [
        Guard(f"{home}.EPS", module.EPS),
        Guard(f"{home}.EPS", module.EPS),
        Guard(f"{home}.FLAGS", module.FLAGS),
        Guard(f"{home}.FLAGS[1]", module.FLAGS[1]),
        Guard(f"{home}.scale", module.scale),
        Guard(f"{home}.scale.__defaults__[0]", 2.0),
        Guard(f"{home}.Kind", module.Kind),
        Guard(f"{home}.TABLE", module.TABLE),  # more than can be told
        Guard(f"{home}.TABLE['a']", module.TABLE["a"]),
        Guard(f"{home}.TABLE['b.c']", module.TABLE["b.c"]),
        Guard(f"{home}.TABLE.a", module.TABLE["a"]),  # a way that leads nowhere
        Guard("G['local']", 5),
        Guard("L['x']", 5),
        Guard("", None, has_value=False),
    ]
    found = globals_read(guards)
    assert found.files == (module.__file__,)
    return found.facts


def test_what_can_be_told_again_is_told(module: Any) -> None:
    found = facts(module)
    named = [".EPS", ".FLAGS", ".FLAGS[1]", ".scale", ".scale.__defaults__[0]", ".Kind", ".TABLE['a']", ".TABLE['b.c']"]
    assert [each.path for each in found] == named
    assert changed_global(found) is None


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("EPS", 1e-6, ".EPS"),
        ("FLAGS", (1, 1, None), ".FLAGS"),
        ("FLAGS", (1,), ".FLAGS"),
        ("scale", lambda x, by=2.0: x * by, ".scale"),
        ("Kind", int, ".Kind"),
        ("TABLE", {"a": 1, "b.c": 3}, ".TABLE['b.c']"),
        ("TABLE", {"b.c": 2}, ".TABLE['a']"),
    ],
)
def test_a_change_is_named(module: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, named: str) -> None:
    """1 is not True, and a function that does the same under another name is another."""
    found = facts(module)
    monkeypatch.setattr(module, name, value)
    assert changed_global(found) == f"globals_here{named}"


def test_what_is_gone_has_changed() -> None:
    assert changed_global([GlobalFact("no_such_module", ".x", "1")]) == "no_such_module.x"
    assert changed_global([GlobalFact("os", ".no_such_name", "1")]) == "os.no_such_name"
