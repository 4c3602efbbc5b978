"""A plan survives JSON completely, and a plan that this process cannot run is refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch.utils import _pytree as pytree

from piecegraph.compiler.common.call_targets import MethodCall, NotStorable
from piecegraph.compiler.common.report import (
    CacheReport,
    CompileReport,
    PassRow,
    PieceRow,
    StaticPieceRow,
    UniquePieceRow,
)
from piecegraph.compiler.common.size_conditions import SizeCondition
from piecegraph.compiler.plans.plan_format import Binding, StoredPlan, from_document, result_spec, to_document
from piecegraph.compiler.splitting.plan import CallStep, PieceStep, Plan, Slot, SplitCall, TensorSpec
from piecegraph.compiler.tracing.signature import ArgumentInput, SizeInput
from piecegraph.compiler.tracing.traced_reads import ReadFact, TracedReads
from piecegraph.passes.matching.graph_pass import Miss
from tests.compiler.toy import SPLIT_OPS

WEIGHT = Binding.of("parameter", ("layers.0.weight",), torch.ones(2, 3))
TABLE = Binding.of("constant", ("constant/0",), torch.ones(3, 2).t())

PLAN = Plan(
    arguments=(Slot("n"), Slot("x")),
    bound=(Slot("weight"), Slot("table")),
    steps=(
        PieceStep(index=0, unique=0, inputs=(Slot("x"), Slot("weight")), outputs=(Slot("q"), Slot("out"))),
        CallStep(
            function="op_pgtoy_attention",
            op=SPLIT_OPS[0],
            args=(Slot("q"), Slot("q"), Slot("q"), Slot("out"), "layer.0"),
            kwargs=(("scale", 0.1), ("at", slice(None, Slot("n"), 2)), ("shape", [(1, Slot("n"))])),
            output=None,
            is_split_op=True,
        ),
        CallStep(
            function="op_method_size", op="size", args=(Slot("x"), 0), kwargs=(), output=Slot("m"), is_split_op=False
        ),
    ),
    results=(Slot("out"), None, 0.5),
)
REPORT = CompileReport(
    compiler="inductor",
    num_pieces=1,
    num_unique_pieces=1,
    num_split_ops=1,
    trace_seconds=1.5,
    split_seconds=0.1,
    compile_seconds=2.0,
    stitch_seconds=0.0,
    static_compile_seconds=0.0,
    static_tune_seconds=0.0,
    pieces=(PieceRow(index=0, unique=0, num_inputs=2, num_outputs=2),),
    unique_pieces=(
        UniquePieceRow(
            index=0,
            key="0a",
            shared_by=1,
            num_nodes=3,
            kernels=None,
            compile_seconds=2.0,
            note="",
            passes={"select-rows-early": 1},
        ),
    ),
    static_pieces=(
        StaticPieceRow(
            unique=0, size=4, key="0b", is_used=True, kernels=2, compile_seconds=1.0, tune_seconds=0.0, note=""
        ),
    ),
    passes=(
        PassRow(
            name="select-rows-early", matches=1, misses=(Miss("node", "why", "a.py:1"),), nodes_removed=2, seconds=0.1
        ),
    ),
    cache=CacheReport(state="miss", key="0c", reason="absent"),
)


def a_plan(**changes: Any) -> StoredPlan:
    plan = StoredPlan(
        plan=PLAN,
        targets={"op_pgtoy_attention": torch.ops.pgtoy.attention.default, "op_method_size": MethodCall("size")},
        bindings={"weight": WEIGHT, "table": TABLE},
        arguments=(SizeInput("num_tokens", 0, 0), ArgumentInput("x", 0)),
        size_symbols={"u0": "num_tokens"},
        results=(("output", 0), ("argument", 0), ("bound", WEIGHT), ("constant", 0.5)),
        tree=pytree.tree_flatten({"a": [1, 2], "b": (3, 4)})[1],
        conditions=(SizeCondition.from_sympy(sympy.Ge(sympy.Symbol("u0"), 2)),),
        symbols=(frozenset({"u0"}),),
        pieces=("0d",),
        static={(0, 4): "0e"},
        split_calls=(
            SplitCall(
                index=0,
                op=SPLIT_OPS[0],
                args=(TensorSpec(("u0", 16), torch.float32, torch.device("cpu")), "u0", 1.5),
                kwargs=(("layer", "layer.0"),),
            ),
        ),
        sources={"tests.compiler.toy": "00"},
        reads=TracedReads(
            places=((-1, ("module", "os")), (0, ("attribute", "sep")), (0, ("item", (1, b"a")))),
            facts=(ReadFact(1, "value", None, "'/'"), ReadFact(2, "member", b"key", "True")),
            identities=((1, 0), (2, 1)),
            tensors={},
        ),
        report=REPORT,
    )
    return replace(plan, **changes)


def document(**changes: Any) -> Any:
    return json.loads(json.dumps(to_document(a_plan(**changes))))


def test_a_plan_survives_json() -> None:
    """Conditions are compared by text, because one comes from sympy and the other from the parser."""
    plan, again = a_plan(), from_document(document())
    assert [condition.text for condition in again.conditions] == ["u0 >= 2"]
    assert again.conditions[0].is_violated_by({"u0": 1})
    assert replace(again, conditions=()) == replace(plan, conditions=())


def test_results_are_built_from_bound_tensors() -> None:
    weight = torch.ones(2, 3)
    built = result_spec(from_document(document()), {WEIGHT.names: weight}).build([torch.zeros(1)], [torch.ones(1)])
    assert built == {"a": [torch.zeros(1), torch.ones(1)], "b": (weight, 0.5)}
    assert built["b"][0] is weight


def test_a_value_that_is_not_data_is_named() -> None:
    odd = SizeCondition("f(u0) > 1", frozenset({"u0"}), lambda values: False)
    with pytest.raises(NotStorable, match=r"it relies on f\(u0\) > 1, which cannot be written down"):
        to_document(a_plan(conditions=(odd,)))
    with pytest.raises(NotStorable, match="neither a registered op nor a function of torch"):
        to_document(a_plan(targets={**a_plan().targets, "op_pgtoy_attention": lambda *args: None}))


def test_an_op_with_another_schema_is_refused() -> None:
    changed = document()
    changed["schemas"]["op_pgtoy_attention"] = "pgtoy::attention(Tensor q) -> ()"
    with pytest.raises(NotStorable, match="op op_pgtoy_attention is pgtoy::attention"):
        from_document(changed)


def test_a_plan_of_another_format_is_refused() -> None:
    with pytest.raises(NotStorable, match="has format 99; this version reads 2"):
        from_document({**document(), "format": 99})


@pytest.mark.parametrize("field", sorted(set(to_document(a_plan())) - {"format"}))
def test_a_missing_field_raises_an_error_that_callers_catch(field: str) -> None:
    """No error of any other type is raised."""
    changed = document()
    del changed[field]
    with pytest.raises(KeyError):
        from_document(changed)


@pytest.mark.parametrize("field", sorted(set(to_document(a_plan())) - {"format"}))
@pytest.mark.parametrize("value", [5, "text", [[1]], {"a": None}, None])
def test_a_malformed_field_raises_an_error_that_callers_catch(field: str, value: Any) -> None:
    with contextlib.suppress(NotStorable, KeyError, TypeError, ValueError, AttributeError):
        from_document({**document(), field: value})
