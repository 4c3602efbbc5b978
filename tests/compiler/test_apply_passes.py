"""Passes over the traced graph: same results, memory no larger, and the module still its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.errors import ConfigError, InputMismatch


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 24, bias=False)
        self.up = nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return out


def compiled(module: nn.Module, compiler: str = "eager", **options: object) -> pg.CompiledModel:
    config = pg.CompileConfig(compiler=compiler, compile_workers=0, **options)  # type: ignore[arg-type]
    return pg.compile(module, config, dynamic_dims={"x": 0}, example_inputs=(torch.randn(3, 16),))


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_merged_projections_give_the_same(compiler: str) -> None:
    module, x = GatedMLP().eval(), torch.randn(5, 16)
    with torch.no_grad():
        expected = module(x)
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = compiled(module, compiler)
    (row,) = model.report().passes
    assert (row.name, row.matches) == ("merge-projections", 1)
    torch.testing.assert_close(model(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(module(x), expected)  # the module itself works on
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


def test_memory_does_not_grow_and_changes_in_place_are_seen() -> None:
    module = GatedMLP().eval()
    model = compiled(module)
    assert module.gate.weight.untyped_storage().data_ptr() == module.up.weight.untyped_storage().data_ptr()
    x = torch.randn(2, 16)
    before = model(x)
    with torch.no_grad():
        module.up.weight.zero_()
    assert not torch.equal(model(x), before)
    torch.testing.assert_close(model(x), module.down.bias.expand(2, -1))


def test_a_merged_parameter_that_is_replaced_is_noticed() -> None:
    module = GatedMLP().eval()
    model = compiled(module)
    module.up.weight = nn.Parameter(torch.zeros(24, 16))
    with pytest.raises(InputMismatch, match=r"up\.weight was replaced after the model was compiled"):
        model(torch.randn(2, 16))


def test_without_the_pass_nothing_is_touched() -> None:
    module = GatedMLP().eval()
    model = compiled(module, passes=())
    assert model.report().passes == ()
    assert module.gate.weight.untyped_storage().data_ptr() != module.up.weight.untyped_storage().data_ptr()


def test_an_unknown_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"passes has 'merge', which is unknown"):
        pg.CompileConfig(passes=("merge",))
    with pytest.raises(ConfigError, match="passes is .merge-projections.; give a tuple"):
        pg.CompileConfig(passes="merge-projections")  # type: ignore[arg-type]
