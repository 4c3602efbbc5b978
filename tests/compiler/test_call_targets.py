"""What steps call, by name: ops, functions of torch, methods, and nothing else."""

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
from piecegraph.compiler.call_targets import MethodCall, NotStorable, schema_of, target_as_data, target_of


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
def test_it_is_the_same_again(target: Any) -> None:
    assert target_of(json.loads(json.dumps(target_as_data(target)))) == target


@pytest.mark.parametrize("target", [os.system, lambda x: x, torch.ops.higher_order.cond, torch.nn.Linear(1, 1), 5])
def test_what_has_no_name_of_torchs_is_refused(target: Any) -> None:
    with pytest.raises(NotStorable):
        target_as_data(target)


@pytest.mark.parametrize(
    "data",
    [{"function": "os.system"}, {"function": "subprocess.run"}, {"op": "pgtoy::none", "overload": "default"}, {}],
)
def test_no_entry_names_anything_else(data: dict[str, str]) -> None:
    with pytest.raises(NotStorable):
        target_of(data)


def test_a_method_is_called_on_the_value() -> None:
    assert MethodCall("size")(torch.ones(2, 3), 1) == 3


def test_schemas_tell_ops_apart() -> None:
    assert schema_of(torch.ops.pgtoy.triple.default) == "pgtoy::triple(Tensor x) -> Tensor"
    assert "mul.Scalar" in str(schema_of(torch.ops.aten.mul))
    assert schema_of(operator.mul) is None
