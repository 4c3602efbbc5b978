"""Facts about what a trace read hold while nothing changes, name a change, and say why one cannot be stated."""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from piecegraph.compiler.tracing.traced_reads import TracedReads, find_changed_read, traced_reads

SOURCE = """
EPS = 1e-5
FLAGS = (1, True, None)
TABLE = {"a": 1, "b.c": 2}
NAMED = [1, 2]

def scale(x, by=2.0):
    return x * by

class Kind:
    pass

def user():
    return NAMED
"""


@dataclass
class Origin:
    create_fn: Any = None


@dataclass
class Guard:
    """A guard of Dynamo's, with the fields that are read."""

    guard_type: str
    name: str
    value: Any
    has_value: bool = True
    orig_guard: Origin | None = None


def about(**keywords: Any) -> Origin:
    return Origin(functools.partial(print, **keywords))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "globals_here.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "globals_here", raising=False)
    yield importlib.import_module("globals_here")
    sys.modules.pop("globals_here", None)


HOME = "G['__import_globals_here']"


def read_of(module: Any) -> TracedReads:
    guards = [
        Guard("EQUALS_MATCH", f"{HOME}.EPS", module.EPS),
        Guard("CONSTANT_MATCH", f"{HOME}.FLAGS", module.FLAGS),
        Guard("CLOSURE_MATCH", f"{HOME}.scale", module.scale),
        Guard("EQUALS_MATCH", f"{HOME}.scale.__defaults__[0]", 2.0),
        Guard("CLASS_MATCH", f"{HOME}.Kind", module.Kind),
        Guard("DICT_CONTAINS", f"{HOME}.TABLE", module.TABLE, orig_guard=about(key="a", invert=False)),
        Guard("HASATTR", f"{HOME}.Kind", module.Kind, orig_guard=about(attr="by")),
        Guard("EQUALS_MATCH", f"{HOME}.TABLE['b.c']", module.TABLE["b.c"]),
        Guard("TYPE_MATCH", "L['args']", (5,)),
        Guard("GRAD_MODE", "", None, has_value=False),
    ]
    return traced_reads(guards, (), nn.Module(), [module.user.__code__])


def changed(read: TracedReads) -> str | None:
    return find_changed_read(read.places, read.facts, read.identities, nn.Module())[0]


def test_facts_hold_while_nothing_changes(module: Any) -> None:
    read = read_of(module)
    assert read.not_comparable == ()
    assert read.files == (module.__file__,)
    assert changed(read) is None


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("EPS", 1e-6, ".EPS"),
        ("FLAGS", (1, 1, None), ".FLAGS"),
        ("FLAGS", (1,), ".FLAGS"),
        ("scale", lambda x, by=2.0: x * by, ".scale"),
        ("Kind", int, ".Kind"),
        ("Kind", type("Kind", (), {"by": 1, "__module__": "globals_here"}), ".Kind"),
        ("TABLE", {"a": 1, "b.c": 3}, ".TABLE['b.c']"),
        ("TABLE", {"b.c": 2}, ".TABLE"),
        ("NAMED", [1, 3], ".NAMED"),
    ],
)
def test_a_changed_value_is_named(
    module: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, named: str
) -> None:
    """1 is not True, and a function that does the same under another name differs.

    A value without a guard counts where the traced code names it.
    """
    read = read_of(module)
    monkeypatch.setattr(module, name, value)
    assert changed(read) == f"globals_here{named}"


@pytest.mark.parametrize(
    ("guard", "reason"),
    [
        (
            Guard("ID_MATCH", f"{HOME}.NAMED", []),
            "it read globals_here.NAMED, a builtins.list, which cannot be compared",
        ),
        (Guard("ID_MATCH", "module", None), "it read the module, a torch.nn.modules.module.Module, which cannot"),
        (Guard("TYPE_MATCH", "G['___unnamed_scope_1']", 1), "which no other process could find"),
        (Guard("RANGE_ITERATOR_MATCH", f"{HOME}.NAMED", []), "its guard RANGE_ITERATOR_MATCH cannot be compared"),
    ],
)
def test_a_read_that_cannot_be_compared_has_a_reason(module: Any, guard: Guard, reason: str) -> None:
    read = traced_reads([guard], (), nn.Module())
    (why,) = read.not_comparable
    assert reason in why


def test_parts_of_the_module_that_the_key_has_are_left_out() -> None:
    names = ["module", "module._modules['a']._parameters['w']", "L['module']._modules['a'].training"]
    assert traced_reads([Guard("TYPE_MATCH", name, None) for name in names], (), nn.Module()).facts == ()


def test_places_that_hold_one_object_must_go_on_holding_one(module: Any) -> None:
    module.A = module.B = module.Kind()
    guards = [Guard("TYPE_MATCH", f"{HOME}.{name}", None) for name in "AB"]
    read = traced_reads(guards, (), nn.Module())
    assert changed(read) is None
    module.B = module.Kind()
    assert changed(read) == "which object globals_here.B is"
