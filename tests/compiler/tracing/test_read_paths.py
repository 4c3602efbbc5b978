"""Dynamo's expressions for what it read become steps, which lead to the same value."""

from __future__ import annotations

import collections
import sys
import types
import weakref
from typing import Any

import pytest
import torch

from piecegraph.compiler.tracing.read_paths import (
    MISSING,
    UNTOUCHED,
    ReadTree,
    UnknownReadExpression,
    has_no_stable_identity,
    resolve_places,
)


class Thing:
    by = 2.0


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType("read_paths_home")
    module.thing, module.table = Thing(), {"a": [1, (2, 3)], (1, "b"): 4}
    module.ordered = collections.OrderedDict(first=5)
    module.weak, module.array = weakref.ref(module.thing), torch.ones(2).numpy()
    monkeypatch.setitem(sys.modules, "read_paths_home", module)
    return module


HOME = "G['__import_read_paths_home']"


@pytest.mark.parametrize(
    ("expression", "value", "name"),
    [
        ("G['_140353296715264_c0'].Tensor", torch.Tensor, "torch.Tensor"),
        (f"{HOME}.table['a'][1][0]", 2, "read_paths_home.table['a'][1][0]"),
        (f"{HOME}.table[(1, 'b')]", 4, "read_paths_home.table[(1, 'b')]"),
        (f"list.__getitem__({HOME}.table['a'], 0)", 1, "read_paths_home.table['a'][0]"),
        (f"dict.__getitem__({HOME}.ordered, 'first')", 5, "read_paths_home.ordered['first']"),
        (f"list(dict.keys({HOME}.ordered))[0]", "first", "key 0 of read_paths_home.ordered"),
        (f"{HOME}.ordered[list(dict.keys({HOME}.ordered))[0]]", 5, "read_paths_home.ordered[key 0 of "),
        (f"dict(type({HOME}.thing).__mro__[0].__dict__)['by']", 2.0, "dict(type(read_paths_home.thing).__mro__[0]"),
        (f"object.__getattribute__({HOME}.thing, 'by')", 2.0, "read_paths_home.thing.by"),
        (f"getattr({HOME}.thing, 'by')", 2.0, "read_paths_home.thing.by"),
        (f"{HOME}.weak().by", 2.0, "read_paths_home.weak().by"),
        ("G['__builtins_dict___7']['len']", len, "builtins['len']"),
        ("module.by", 2.0, "the module.by"),
        ("L['module'].by", 2.0, "the module.by"),
        ("module.gone.further", MISSING, "the module.gone.further"),
    ],
)
def test_a_place_is_found_again(home: Any, expression: str, value: Any, name: str) -> None:
    tree = ReadTree()
    at = tree.place(expression, {"read_paths_home": "read_paths_home"})
    assert at is not None
    found = resolve_places(tree.nodes, Thing())
    assert found[at] is value or found[at] == value
    assert tree.name(at).startswith(name)


def test_steps_are_shared_and_know_their_module(home: Any) -> None:
    tree = ReadTree()
    modules = {"read_paths_home": "read_paths_home"}
    first, second = (tree.place(f"{HOME}.table['a'][{each}]", modules) for each in (0, 1))
    assert len(tree.nodes) == 5
    assert (tree.root(first or 0), tree.root(second or 0)) == ("read_paths_home", "read_paths_home")
    of_array = tree.place(f"___from_numpy({HOME}.array)", modules)
    assert of_array is not None
    home.array[0] = 7
    assert resolve_places(tree.nodes, None)[of_array].tolist() == [7, 1]


def test_arguments_have_no_place() -> None:
    tree = ReadTree()
    assert [tree.place(each, {}) for each in ("args[0]", "L['kwargs']['x']", "type(sized)")] == [None, None, None]


@pytest.mark.parametrize(
    "expression",
    ["G['__import_unknown'].x", "G['___unnamed_scope_1']", "f(module)", "module[0.5]", "list(module)[0]", "module +"],
)
def test_an_expression_with_unknown_steps_is_refused(expression: str) -> None:
    with pytest.raises(UnknownReadExpression):
        ReadTree().place(expression, {})


def test_modules_of_torch_are_not_imported_to_compare_them() -> None:
    assert resolve_places([(-1, ("module", "torch.no_such_module")), (0, ("attribute", "x"))], None) == [
        UNTOUCHED,
        UNTOUCHED,
    ]
    assert resolve_places([(-1, ("module", "no_such_module_of_ours"))], None) == [MISSING]


def test_values_whose_identity_means_nothing() -> None:
    assert all(map(has_no_stable_identity, (None, 1, "a", (), len, Thing, sys, [].append)))
    assert not any(map(has_no_stable_identity, ([], {}, Thing(), torch.ones(1))))
