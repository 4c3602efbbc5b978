"""Tracing of code that asks about a declared size."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.errors import CompileError, GraphBreak, InputMismatch, SizeSpecialized

CONFIG = pg.CompileConfig(compiler="eager", passes=(), cache=False)


class AsksForOne(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0) + y.sum() if x.shape[0] > 1 else x


class AsksForMore(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 7 else x


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.randint(1, 1000)


def test_code_that_draws_from_random_is_refused() -> None:
    with pytest.raises(CompileError, match="random numbers of Python"):
        pg.compile(Draws(), CONFIG, example_inputs=(torch.ones(4),))


class DrawsFromNumpy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.as_tensor(np.random.rand(4))


def test_code_that_draws_from_numpy_is_refused() -> None:
    """torch would draw from its own stream instead, which `np.random.seed` does not reach."""
    with pytest.raises(GraphBreak, match=r"np\.random\.rand"):
        pg.compile(DrawsFromNumpy(), CONFIG, example_inputs=(torch.ones(4),))


def test_code_that_asks_whether_a_size_is_one_is_compiled_for_two_or_more() -> None:
    """Sizes that the code does not ask about may still be 1."""
    dims = {"x": {0: "length"}, "y": {0: "other"}}
    model = pg.compile(AsksForOne(), CONFIG, dynamic_dims=dims, example_inputs=(torch.ones(4), torch.ones(3)))
    assert torch.equal(model(torch.ones(3), torch.ones(1)), torch.tensor([2.0, 3.0, 4.0]))
    with pytest.raises(InputMismatch, match="length >= 2, on which the model's code relies"):
        model(torch.ones(1), torch.ones(3))


def test_the_advice_for_a_size_that_was_not_compiled_works() -> None:
    x, y = torch.ones(1), torch.ones(3)
    model = pg.compile(AsksForOne(), CONFIG, dynamic_dims={"y": {0: "other"}}, example_inputs=(x, y))
    assert torch.equal(model(x * 5, torch.ones(7)), x * 5)


class RotatesTwoNumbers(nn.Module):
    """The rotary embedding of one head, of two numbers: halves of shape (1, 1, length, 1)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = x.view(1, -1, 1, 4).transpose(1, 2)
        first, second = head[..., :1], head[..., 1:2]
        return torch.cat((-second, first), dim=-1)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_halves_of_one_number_do_not_ask_for_two_rows(compiler: str) -> None:
    """The fake values of torch ask for the memory format of such a tensor, which one row would change."""
    config = pg.CompileConfig(compiler=compiler, cache=False, compile_workers=0)
    model = pg.compile(
        RotatesTwoNumbers(), config, dynamic_dims={"x": {0: "length"}}, example_inputs=(torch.randn(3, 4),)
    )
    for length in (1, 2, 5):
        x = torch.randn(length, 4)
        assert torch.equal(model(x), RotatesTwoNumbers()(x))


class Adds(nn.Module):
    held: torch.Tensor

    def __init__(self, held: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("held", held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.held


def test_a_tensor_whose_sign_is_not_in_its_memory_is_refused() -> None:
    """Such as the imaginary part of a conjugate: Inductor's code reads the memory, and by name torch's does, too."""
    negated = torch.complex(torch.ones(2, 4), torch.ones(2, 4)).conj().imag
    example = torch.complex(torch.ones(2, 4), torch.ones(2, 4)).imag
    model = pg.compile(Adds(torch.ones(4)), CONFIG, example_inputs=(example,))
    assert torch.equal(model(example), torch.full((2, 4), 2.0))
    with pytest.raises(InputMismatch, match=r"x is negated when it is read .* Call \.resolve_neg\(\) on it"):
        model(negated)
    with pytest.raises(CompileError, match="buffer held is negated when it is read"):
        pg.compile(Adds(negated), CONFIG, example_inputs=(torch.ones(4),))
    by_name = torch.compile(Adds(torch.ones(4)), backend="piecegraph", fullgraph=True, options={"compiler": "eager"})
    with pytest.raises(Exception, match="is negated when it is read"):
        by_name(negated)


class ReadsSizeAlone(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, *, z: dict[str, torch.Tensor]) -> torch.Tensor:
        return x[: z["rows"].shape[1]] * 2


def test_a_declared_argument_need_not_be_read() -> None:
    """Neither at all (y), nor anything but its size (z). It is checked as every other."""
    dims = {"x": {0: "length"}, "y": {0: "other"}, "z['rows']": {1: "rows"}}
    z = {"rows": torch.ones(2, 4)}
    example = {"x": torch.ones(5), "y": torch.ones(3), "z": z}
    model = pg.compile(ReadsSizeAlone(), CONFIG, dynamic_dims=dims, example_inputs=example)
    for length, other, rows in ((5, 3, 4), (7, 1, 2), (2, 9, 2)):
        result = model(torch.ones(length), torch.ones(other), z={"rows": torch.ones(2, rows)})
        assert result.tolist() == [2.0] * min(length, rows)
    with pytest.raises(InputMismatch, match="y has dtype"):
        model(torch.ones(5), torch.ones(3, dtype=torch.int64), z=z)


def test_code_that_asks_anything_else_about_a_size_is_refused() -> None:
    with pytest.raises(SizeSpecialized, match="u0 > 7"):
        pg.compile(AsksForMore(), CONFIG, dynamic_dims={"x": 0}, example_inputs=(torch.ones(4),))
    with pytest.raises(SizeSpecialized):
        pg.compile(AsksForOne(), CONFIG, dynamic_dims={"x": 0}, example_inputs=(torch.ones(1), torch.ones(3)))


def small_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def test_another_threads_forward_may_collect_outputs_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every forward of transformers sets and resets is one object for all threads while any of them is traced."""
    from transformers.utils import output_capturing

    module, ids = small_llama(), torch.randint(0, 32, (1, 6))
    expected = module(ids).logits
    monkeypatch.setattr(output_capturing._active_collector, "compiling", True)
    monkeypatch.setattr(output_capturing._active_collector, "global_var", {})
    model = pg.compile(module, CONFIG, dynamic_dims={"input_ids": {1: "length"}}, example_inputs=(ids.clone(),))
    torch.testing.assert_close(model(ids).logits, expected)


def test_a_model_of_transformers_with_its_own_attention() -> None:
    module = small_llama()
    ids = torch.randint(0, 32, (1, 9))
    model = pg.compile(module, CONFIG, dynamic_dims={"input_ids": {1: "length"}}, example_inputs=(ids[:, :6].clone(),))
    for length in (9, 2):
        torch.testing.assert_close(model(ids[:, :length].clone()).logits, module(ids[:, :length]).logits)
