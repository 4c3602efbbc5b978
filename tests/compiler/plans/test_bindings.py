"""Bound tensors are those of the module at hand, by name, checked before anything of it is changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from piecegraph.compiler.common.call_targets import NotStorable
from piecegraph.compiler.plans.bindings import Bindings, bind, constants_of, members_of
from piecegraph.compiler.plans.plan_format import Binding, StoredPlan
from piecegraph.compiler.tracing.signature import BoundInput
from tests.compiler.plans.test_plan_format import a_plan


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 5)
        self.register_buffer("table", torch.arange(4))


def plan_of(bindings: dict[str, Binding]) -> StoredPlan:
    return replace(a_plan(), bindings=bindings, results=())


def weights(model: Two) -> dict[str, Binding]:
    return {
        "bias": Binding.of("parameter", ("left.bias",), model.left.bias),
        "table": Binding.of("buffer", ("table",), model.get_buffer("table")),
        "both": Binding.of("merged", ("left.weight", "right.weight"), torch.zeros(7, 3)),
    }


def test_tensors_are_found_and_merged_by_name() -> None:
    model = Two()
    wanted = torch.cat([model.left.weight, model.right.weight])
    plan = plan_of(weights(model))
    bound = bind(plan, members_of(plan, model), {})
    assert bound.tensors["bias"] is model.left.bias
    assert bound.tensors["table"] is model.get_buffer("table")
    assert torch.equal(bound.tensors["both"], wanted)
    bound.tensors["both"].zero_()
    assert not model.left.weight.any()
    assert {each.name for each in bound.watched} == {"left.bias", "table", "left.weight", "right.weight"}


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.left, "bias", nn.Parameter(torch.zeros(3))),
        lambda model: setattr(model.left, "bias", nn.Parameter(torch.zeros(2, dtype=torch.float64))),
        lambda model: setattr(model, "table", torch.arange(5)),
        lambda model: setattr(model.right, "weight", nn.Parameter(torch.zeros(5, 4))),
        lambda model: setattr(model.right, "weight", nn.Parameter(torch.zeros(6, 3))),
    ],
)
def test_a_module_that_differs_is_refused_and_unchanged(change: Any) -> None:
    model = Two()
    plan = plan_of(weights(model))
    change(model)
    before = [tensor.data_ptr() for tensor in model.parameters()]
    with pytest.raises(NotStorable):
        members_of(plan, model)
    assert [tensor.data_ptr() for tensor in model.parameters()] == before


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(1, 3).expand(4, 3).contiguous(),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_a_tensor_without_a_name_is_restored_bitwise(tensor: torch.Tensor) -> None:
    made = Bindings({id(tensor): BoundInput("x", "constant", tensor)}, {})
    binding = made.binding(tensor)
    assert made.binding(tensor) is binding
    plan = plan_of({"x": binding})
    (again,) = constants_of(plan, made.blobs, ()).values()
    assert torch.equal(again, tensor)
    assert (again.dtype, again.stride()) == (tensor.dtype, tensor.stride())


def test_bytes_that_do_not_fit_their_tensor_are_refused() -> None:
    plan = plan_of({"x": Binding.of("constant", ("constant/0",), torch.ones(3))})
    for blobs in ({}, {"constant/0": b"1234"}):
        with pytest.raises(NotStorable, match="make no tensor"):
            constants_of(plan, blobs, ())


def test_a_tensor_that_the_trace_read_elsewhere_is_bound_from_there() -> None:
    """Its bytes are not stored, and a tensor that differs is refused."""
    tensor = torch.ones(3)
    made = Bindings({id(tensor): BoundInput("x", "constant", tensor, source="G['A']")}, {"G['A']": 1})
    binding = made.binding(tensor)
    assert made.blobs == {}
    plan = plan_of({"x": binding})
    assert list(constants_of(plan, {}, [None, tensor]).values()) == [tensor]
    for other in (None, torch.ones(4), torch.ones(3, dtype=torch.float64)):
        with pytest.raises(NotStorable, match="what was a tensor"):
            constants_of(plan, {}, [None, other])


def test_a_constant_computed_from_unloaded_weights_is_refused() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(NotStorable, match="is computed from weights, which were not loaded"):
        Bindings({id(fake): BoundInput("x", "constant", fake)}, {}).binding(fake)


@pytest.mark.parametrize("value", [nn.Linear(1, 1), torch.ones(1, device="meta"), torch.ones(2).to_sparse()])
def test_a_value_without_bytes_is_refused(value: Any) -> None:
    with pytest.raises(NotStorable):
        Bindings({}, {}).binding(value)
