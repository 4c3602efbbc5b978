"""An adapter of random numbers in a slot of the device, with which a selfcheck runs what adapters add."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from piecegraph.passes.ops.lora import LoraRows, set_lora_rows
from piecegraph.runner.lora.modules import AdaptedModules

TRIAL_SLOT = 0

_SIZE = 0.05
"""The standard deviation of the numbers of both matrices."""


@contextmanager
def trial_adapter(adapted: AdaptedModules | None) -> Iterator[None]:
    """Have an adapter for all modules lie in `TRIAL_SLOT` while the block runs; None: adapters are not enabled.

    No request may have an adapter, before and while the block runs. The slot is empty afterwards.
    """
    if adapted is None:
        yield
        return
    generator = torch.Generator().manual_seed(0)
    rank = adapted.options.max_rank

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * _SIZE

    found = {path: (matrix(rank, each.size), matrix(each.num_columns, rank)) for path, each in adapted.shapes.items()}
    adapted.write(TRIAL_SLOT, found)
    try:
        yield
    finally:
        adapted.write(TRIAL_SLOT, {})


@contextmanager
def trial_rows(num_tokens: int, num_logits: int, device: torch.device) -> Iterator[None]:
    """Give every second row of a step the adapter in `TRIAL_SLOT`, from the first on; row `r` of logits is token `r`.

    The step must not enter a forward context.
    """
    slots = torch.full((num_tokens,), -1, dtype=torch.int32, device=device)
    slots[::2] = TRIAL_SLOT
    set_lora_rows(LoraRows(slots, slots[:num_logits]))
    try:
        yield
    finally:
        set_lora_rows(None)
