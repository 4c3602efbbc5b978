"""The scans of Mamba and Mamba-2: they are the recurrence, and a state continues."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.state_layers.selective_scan import CHUNK_SIZE, selective_scan

BATCH, HEADS, HEAD_DIM, GROUPS, STATES = 2, 4, 3, 2, 5


def case(num_tokens: int, rates_shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return x, dt, A, B, C, D."""
    torch.manual_seed(num_tokens)
    b, c = torch.randn(2, BATCH, num_tokens, GROUPS, STATES)
    x, dt = torch.randn(BATCH, num_tokens, HEADS, HEAD_DIM), torch.rand(BATCH, num_tokens, HEADS)
    return x, dt, -torch.rand(HEADS, *rates_shape) * 2, b, c, torch.randn(HEADS)


def run(inputs: tuple[torch.Tensor, ...], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, dt, rates, b, c, skip = inputs
    return selective_scan(x, dt, rates, b, c, skip, state)


def by_definition(inputs: tuple[torch.Tensor, ...], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence, a token at a time, in float64."""
    x, dt, rates, b, c, skip = (each.double() for each in inputs)
    b, c = (each.repeat_interleave(HEADS // GROUPS, dim=2) for each in (b, c))
    out, state = torch.zeros_like(x), state.double()
    for t in range(x.shape[1]):
        step = dt[:, t, :, None]
        kept = (step * rates.reshape(HEADS, -1)).exp()
        state = state * kept[:, :, None] + torch.einsum("bhp,bhn->bhpn", step * x[:, t], b[:, t])
        out[:, t] = torch.einsum("bhpn,bhn->bhp", state, c[:, t]) + skip[:, None] * x[:, t]
    return out, state


@pytest.mark.parametrize("rates_shape", [(), (STATES,)], ids=["Mamba-2", "Mamba"])
@pytest.mark.parametrize("num_tokens", [1, 2, 9, CHUNK_SIZE + 5])
def test_it_is_the_recurrence(num_tokens: int, rates_shape: tuple[int, ...]) -> None:
    inputs = case(num_tokens, rates_shape)
    before = torch.randn(BATCH, HEADS, HEAD_DIM, STATES)
    out, state = run(inputs, before)
    expected, last = by_definition(inputs, before)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), last, rtol=1e-4, atol=1e-4)


def test_a_state_continues_where_it_was_cut() -> None:
    x, dt, rates, b, c, skip = case(20, ())
    whole, last = selective_scan(x, dt, rates, b, c, skip, torch.zeros(BATCH, HEADS, HEAD_DIM, STATES))
    state, parts = torch.zeros(BATCH, HEADS, HEAD_DIM, STATES), []
    for start, end in ((0, 6), (6, 7), (7, 20)):
        rows = slice(start, end)
        part, state = selective_scan(x[:, rows], dt[:, rows], rates, b[:, rows], c[:, rows], skip, state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    torch.testing.assert_close(state, last)
