"""The ops of adapters: nothing happens outside a step, or in one without adapters; fakes have the results' shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from piecegraph.passes.ops.lora import LORA_EXPAND, LORA_LOOKUP, LORA_SHRINK, LoraRows, set_lora_rows

RANKS = torch.tensor([2, 0], dtype=torch.int32)
SLOTS = torch.tensor([0, -1, 1], dtype=torch.int32)


@contextmanager
def context(rows: LoraRows | None) -> Iterator[None]:
    set_lora_rows(rows)
    try:
        yield
    finally:
        set_lora_rows(None)


def apply(x: torch.Tensor, rows: str = "tokens") -> torch.Tensor:
    """Return what the adapters of `SLOTS` add to zeros `[1, 3, 6]`."""
    torch.manual_seed(0)
    a, b, y = torch.randn(2, 3, 5), torch.randn(2, 6, 3), torch.zeros(1, 3, 6)
    LORA_EXPAND(y, LORA_SHRINK(x, a, RANKS, rows), b, RANKS, rows)
    return y


def test_a_step_without_adapters_changes_nothing() -> None:
    x = torch.ones(1, 3, 5)
    assert not apply(x).any()
    with context(None):
        assert not apply(x).any()


def test_only_rows_with_an_adapter_for_the_module_change() -> None:
    x = torch.randn(1, 3, 5)
    with context(LoraRows(SLOTS, SLOTS)):
        y = apply(x)
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 5), torch.randn(2, 6, 3)
    torch.testing.assert_close(y[0, 0], b[0, :, :2] @ (a[0, :2] @ x[0, 0]))
    assert not y[0, 1:].any()


def test_rows_of_logits_have_slots_of_their_own() -> None:
    with context(LoraRows(SLOTS, SLOTS.flip(0))):
        y = apply(torch.ones(1, 3, 5), "logits")
    assert y[0, 2].all() and not y[0, :2].any()


def test_a_lookup_is_a_shrink_of_one_hot_rows() -> None:
    a, ids = torch.randn(2, 7, 3), torch.tensor([[4, 2, 6]])
    with context(LoraRows(SLOTS, SLOTS)):
        found = LORA_LOOKUP(ids, a, RANKS, "tokens")
        one_hot = torch.nn.functional.one_hot(ids, 7).float()
        wanted = LORA_SHRINK(one_hot, a.transpose(1, 2), RANKS, "tokens")
    torch.testing.assert_close(found[0, :2], wanted[0, :2])


def test_what_is_half_precision_is_rounded_once() -> None:
    x = torch.randn(1, 3, 5)
    with context(LoraRows(SLOTS, SLOTS)):
        exact = apply(x)
        torch.manual_seed(0)
        a, b, y = torch.randn(2, 3, 5), torch.randn(2, 6, 3), torch.zeros(1, 3, 6, dtype=torch.bfloat16)
        LORA_EXPAND(y, LORA_SHRINK(x, a, RANKS, "tokens"), b, RANKS, "tokens")
    assert torch.equal(y, exact.bfloat16())


def test_fakes_have_the_shapes_of_the_results() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, ids, a = torch.empty(1, 9, 5), torch.empty(1, 9, dtype=torch.int64), torch.empty(2, 3, 5)
        assert LORA_SHRINK(x.bfloat16(), a.bfloat16(), RANKS, "tokens").shape == (9, 3)
        assert LORA_LOOKUP(ids, torch.empty(2, 7, 3), RANKS, "tokens").dtype is torch.float32
