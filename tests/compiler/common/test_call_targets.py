"""Targets of calls as data: ops, functions of torch, methods, and nothing else."""

from __future__ import annotations

import json
import math
import operator
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tests.compiler.toy  # noqa: F401  (defines ops)
from piecegraph.compiler.common.call_targets import MethodCall, NotStorable, schema_of, target_as_data, target_from_data


@pytest.mark.parametrize(
    "target",
    [
        torch.ops.pgtoy.triple.default,
        torch.ops.pgtoy.triple,
        torch.ops.aten.mul.Tensor,
        F.scaled_dot_product_attention,
        operator.mul,
        math.floor,
        torch.sym_max,
        MethodCall("size"),
    ],
    ids=lambda target: getattr(target, "__name__", str(target)),
)
def test_a_target_survives_as_data(target: Any) -> None:
    assert target_from_data(json.loads(json.dumps(target_as_data(target)))) == target


@pytest.mark.parametrize("target", [os.system, lambda x: x, torch.ops.higher_order.cond, torch.nn.Linear(1, 1), 5])
def test_a_function_outside_torch_is_refused(target: Any) -> None:
    with pytest.raises(NotStorable):
        target_as_data(target)


@pytest.mark.parametrize(
    "data",
    [{"function": "os.system"}, {"function": "subprocess.run"}, {"op": "pgtoy::none", "overload": "default"}, {}],
)
def test_data_that_names_anything_else_is_refused(data: dict[str, str]) -> None:
    with pytest.raises(NotStorable):
        target_from_data(data)


def test_a_method_is_called_on_the_value() -> None:
    assert MethodCall("size")(torch.ones(2, 3), 1) == 3


def test_different_ops_have_different_schemas() -> None:
    assert schema_of(torch.ops.pgtoy.triple.default) == "pgtoy::triple(Tensor x) -> Tensor"
    assert "mul.Scalar" in str(schema_of(torch.ops.aten.mul))
    assert schema_of(operator.mul) is None
