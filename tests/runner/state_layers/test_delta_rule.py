"""The gated delta rule: chunks give what single tokens give, and a state continues."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.state_layers.delta_rule import CHUNK_SIZE, gated_delta_rule

BATCH, HEADS, KEY_DIM, VALUE_DIM = 2, 3, 4, 5


def case(num_tokens: int, decay_shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(num_tokens)
    shape = (BATCH, num_tokens, HEADS)
    query, key = torch.randn(2, *shape, KEY_DIM)
    decay = -torch.rand(*shape, *decay_shape) * 3
    return query, key, torch.randn(*shape, VALUE_DIM), decay, torch.rand(shape)


def run(inputs: tuple[torch.Tensor, ...], state: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, decay, beta = inputs
    return gated_delta_rule(query, key, value, decay, beta, state, scale)


def by_definition(inputs: tuple[torch.Tensor, ...], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule, a token and a head at a time, in float64."""
    query, key, value, decay, beta = (each.double() for each in inputs)
    query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
    out, state = torch.zeros_like(value), state.double().clone()
    for b in range(value.shape[0]):
        for h in range(HEADS):
            for t in range(value.shape[1]):
                kept = state[b, h] * decay[b, t, h].exp().reshape(-1, 1)
                state[b, h] = kept + torch.outer(key[b, t, h], beta[b, t, h] * (value[b, t, h] - key[b, t, h] @ kept))
                out[b, t, h] = 0.5 * query[b, t, h] @ state[b, h]
    return out, state


@pytest.mark.parametrize("decay_shape", [(), (KEY_DIM,)], ids=["a head", "a channel"])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, CHUNK_SIZE, CHUNK_SIZE + 9])
def test_it_is_the_rule(num_tokens: int, decay_shape: tuple[int, ...]) -> None:
    inputs = case(num_tokens, decay_shape)
    before = torch.randn(BATCH, HEADS, KEY_DIM, VALUE_DIM)
    out, state = run(inputs, before, 0.5)
    expected, last = by_definition(inputs, before)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), last, rtol=1e-4, atol=1e-5)


def test_a_state_continues_exactly_where_it_was_cut() -> None:
    inputs = case(20, ())
    whole, last = run(inputs, torch.zeros(BATCH, HEADS, KEY_DIM, VALUE_DIM), 1.0)
    state, parts = torch.zeros(BATCH, HEADS, KEY_DIM, VALUE_DIM), []
    for start, end in ((0, 6), (6, 7), (7, 20)):
        part, state = run(tuple(each[:, start:end] for each in inputs), state, 1.0)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    torch.testing.assert_close(state, last)
