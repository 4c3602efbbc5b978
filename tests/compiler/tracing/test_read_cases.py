"""What a trace read is compared before its plan is used: no start loads a stale one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph.compiler.plans.plan_format import reads_as_data, reads_of_data
from piecegraph.compiler.tracing.traced_reads import find_changed_read
from tests.compiler.store.small_models import SIZE, compiled, state
from tests.compiler.tracing.read_cases import CASES, VARIABLE, Case, Start, imported, reads

QUICK = {
    "tensor_in_place",
    "array",
    "environment_getenv",
    "environment_default",
    "dict_length",
    "dict_keys",
    "set_order",
    "closure_tensor",
    "method_put_in_place",
    "which_other",
    "init_environment",
    "model_class_tensor",
    "model_by_id",
    "assumed_constant",
    "matmul_in_tf32",
    "composite_op",
    "builtin_shadowed",
    "namespace_tried",
    "instance_check",
    "registered",
    "registered_with_a_library",
    "subclasses_of_class",
    "recursion_limit",
    "tensor_method",
    "module_attribute_missing",
    "weight_attribute_missing",
    "function_in_graph_closure",
    "autocast_dtype",
}
"""A case of each mechanism."""


def all_cases() -> list[Any]:
    return [pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.slow]) for case in CASES]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def what_changed(start: Start, stored: dict[str, Any], model: nn.Module) -> str | None:
    """Why a plan that was stored as `stored` is not loaded; None: it would be."""
    if start.key != stored["key"]:
        return "the key"
    read = reads_of_data(stored["reads"])
    return find_changed_read(read.places, read.facts, read.identities, model)[0]


def stored(start: Start, model: nn.Module) -> dict[str, Any] | None:
    """What is kept of a compile of `model`; None: nothing, with a reason for the report."""
    read = reads(model)
    if start.key is None or read.not_comparable:
        return None
    found: dict[str, Any] = json.loads(json.dumps({"key": start.key, "reads": reads_as_data(read)}))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", all_cases())
def test_a_change_of_what_was_read_is_seen(case: Case, folder: Path) -> None:
    """Unless the plan was not kept. What did not change is a hit."""
    with imported(case, folder) as module:
        model = module.Model()
        first = Start.of(model)
        kept = stored(first, model)
        assert (kept is not None) == case.is_kept
        if kept is not None:
            again = module.Model()
            assert what_changed(Start.of(again), kept, again) is None
        module.change()
        changed = module.Model()
        second = Start.of(changed)
        assert not first.is_like(second), "the case changes nothing"
        if kept is not None:
            assert (what_changed(second, kept, changed) is None) == case.is_followed


_SET = "self.a = set('abc')"

ORDERS = (
    Case("order_next", "A = {'a', 'b', 'c'}; B = {'a': 2, 'b': 3, 'c': 4}", "x * B[next(iter(A))]", "pass"),
    Case("order_loop", "A = frozenset('abc')", "x * (2 if [k for k in A][0] == 'a' else 3)", "pass"),
    Case("order_of_self", "", "x * (2 if ''.join(self.a) == 'abc' else 3)", "pass", init=_SET),
    Case(
        "order_by_name",
        "",
        "x * (2 if next(iter(getattr(self, 'a'))) in self.a else 3)",
        "pass",
        init=_SET,
    ),
    Case("order_display", "B = {'a': 2, 'b': 3, 'c': 4}", "x * B[next(iter({'a', 'b', 'c'}))]", "pass"),
    Case("order_of_two", "B = {'a': 2, 'b': 3, 'c': 4}", "x * B[next(iter({'a', 'b'}))]", "pass"),
    Case("order_called", "B = {'a': 2, 'b': 3, 'c': 4}", "x * B[set('abc').pop()]", "pass"),
    Case("order_comprehension", "B = {'a': 2, 'b': 3, 'c': 4}", "x * B[next(iter({k for k in B}))]", "pass"),
)
"""Reads of the order of strings in a set, which another process with another hash seed has otherwise."""

SEARCHES = (
    Case("search_global", "A = {'a', 'b', 'c'}", "x * (2 if 'a' in A else 3)", "pass"),
    Case("search_self", "", "x * (2 if 'a' in self.a else 3)", "pass", init="self.a = {'a', 'b', 'c'}"),
    Case("search_display", "K = 'a'", "x * (2 if K in {'a', 'b', 'c'} else 3)", "pass"),
    Case("search_length", "A = {'a', 'b', 'c'}", "x * len(A) + len(set('abc'))", "pass"),
    Case("search_sorted", "A = {'a', 'b', 'c'}", "x * (2 if sorted(A)[0] == 'a' else 3)", "pass"),
    Case("search_class", "A = (1, 2)", "x * (2 if isinstance(A, set) else 3)", "pass"),
    Case("search_numbers", "", "x * sum({1, 2}) + sum({3, 4, 5})", "pass"),
)
"""Uses of sets whose result is the same in every process: they stay in the cache."""


@pytest.mark.slow
def test_other_processes_find_what_was_read_as_it_was(folder: Path) -> None:
    """Nothing that is compared is of one process alone, but what makes a plan unfit to be kept.

    The order of strings in a set is of one hash seed.
    """
    first, other_seed = (json.loads(in_a_child(folder, seed)) for seed in ("1", "0"))
    same_seed = json.loads(in_a_child(folder, "1", "sets"))
    assert {name for name, kept in first.items() if kept is None} == {case.name for case in CASES if not case.is_kept}
    kept = {case.name for case in (*CASES, *ORDERS, *SEARCHES) if case.is_kept}
    assert other_seed.keys() == kept and same_seed.keys() == {case.name for case in (*ORDERS, *SEARCHES)}
    assert {name for name, what in other_seed.items() if what is not None} == {case.name for case in ORDERS}
    assert set(same_seed.values()) == {None}


def in_a_child(folder: Path, seed: str, cases: str = "all") -> str:
    """What `main` prints in a process of its own."""
    kept = folder / "kept.json"
    is_second = kept.exists()
    arguments = [sys.executable, "-W", "ignore", "-m", __name__, str(folder)]
    environment = {**os.environ, "PYTHONHASHSEED": seed, "READ_CASES": cases}
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    if not is_second:
        kept.write_text(done.stdout)
    return done.stdout


def main(folder: Path, cases: Sequence[Case]) -> None:
    """Without kept.json in `folder`, print what is stored of each case; with it, what changed of each."""
    sys.path.insert(0, str(folder))
    kept = folder / "kept.json"
    known: dict[str, Any] | None = json.loads(kept.read_text()) if kept.exists() else None
    found: dict[str, Any] = {}
    for case in cases:
        with imported(case, folder) as module:
            model = module.Model()
            start = Start.of(model)
            if known is None:
                found[case.name] = stored(start, model)
            elif known[case.name] is not None:
                found[case.name] = what_changed(start, known[case.name], model)
    sys.stdout.write(json.dumps(found))


TENSORS = {number: torch.eye(SIZE) * (number + 1) for number in range(4)}
TABLE = {"a": 1}


class Reads(nn.Module):
    """Library calls over what is read from elsewhere: tensors of this module, the environment, a table's length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.pgtoy.triple.default(x)
        return x.mm(TENSORS[0]).mm(TENSORS[len(TABLE)]).mm(TENSORS[int(os.getenv(VARIABLE, "2"))])


def test_compiled_models_follow_what_is_read(whole_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From compile to load, in one process; a tensor that was loaded is the one that lies there."""
    x = torch.ones(2, SIZE)

    def start() -> str:
        model = compiled(Reads())
        assert torch.equal(model(x), Reads()(x))
        return state(model)

    assert [start(), start()] == ["miss", "hit"]
    with monkeypatch.context() as change:
        change.setenv(VARIABLE, "3")
        assert [start(), start()] == ["miss", "hit"]
    with monkeypatch.context() as change:
        change.setitem(TABLE, "b", 2)
        assert [start(), start()] == ["miss", "hit"]
    with monkeypatch.context() as change:
        change.setitem(TENSORS, 0, TENSORS[0] * 5)
        assert [start(), start()] == ["miss", "hit"]
        model = compiled(Reads())
        TENSORS[0].mul_(2)
        assert torch.equal(model(x), Reads()(x))
        assert start() == "miss"
    assert start() == "miss"


class ReadsItsId(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.pgtoy.triple.default(x)
        return x.mm(TENSORS[TABLE.get(str(id(self)), 0)])


def test_what_cannot_be_compared_is_not_kept(whole_cache: Path) -> None:
    report = compiled(ReadsItsId()).report().cache
    assert (report.state, compiled(ReadsItsId()).report().cache.state) == ("miss", "miss")
    assert "it read the module" in report.not_stored
    assert "cannot be compared" in report.not_stored


if __name__ == "__main__":
    sets = (*ORDERS, *SEARCHES)
    main(Path(sys.argv[1]), sets if os.environ["READ_CASES"] == "sets" else (*CASES, *sets))
