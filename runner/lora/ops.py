"""The ops of adapters: `lora_shrink` and `lora_lookup`, which make a few numbers of each row, and `lora_expand`.

A row is a token, or a row of logits. The forward context says which slot of the stacked matrices holds the adapter of
each row, if any. In a step without adapters the ops do nothing: they launch nothing, and what `lora_shrink` returns is
undefined and unread. So a graph that is captured for such steps holds none of them.
"""

from __future__ import annotations

import torch

from piecegraph.passes.ops.library import define_op
from piecegraph.runner.attention.interface.forward_context import ForwardContext, LoraRows, current_context

TOKENS, LOGITS = "tokens", "logits"
"""The kinds of rows that a module computes."""


def lora_shrink(x: torch.Tensor, a: torch.Tensor, ranks: torch.Tensor, rows: str) -> torch.Tensor:
    """Return `x @ a[slot].T` of each row, `[num_rows, max_rank]` float32, a new tensor.

    `x`: `[..., size]`. `a`: `[num_slots, max_rank, size]`. `ranks`: `[num_slots]` int32, how many rows of `a[slot]`
    there are; columns behind them, and rows without an adapter, are undefined. Nothing is mutated.
    """
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    out = flat.new_empty((flat.shape[0], a.shape[1]), dtype=torch.float32)
    batch = _rows()
    if batch is None:
        return out
    if out.device.type == "cuda":
        from piecegraph.runner.lora.kernels.shrink_expand import shrink_on_gpu

        shrink_on_gpu(flat, a, ranks, _slots(batch, rows, flat.shape[0]), out)
        return out
    for slot, index in batch.groups(rows, flat.shape[0]):
        rank = int(ranks[slot])
        if rank:
            out[index, :rank] = flat[index].float() @ a[slot, :rank].float().T
    return out


def lora_lookup(ids: torch.Tensor, a: torch.Tensor, ranks: torch.Tensor, rows: str) -> torch.Tensor:
    """Return `a[slot, id]` of each row, `[num_rows, max_rank]` float32, as `lora_shrink` of one-hot rows would.

    `ids`: `[...]` int64. `a`: `[num_slots, num_ids, max_rank]`.
    """
    flat = ids.reshape(-1)
    batch = _rows()
    if batch is None:
        return a.new_empty((flat.shape[0], a.shape[2]), dtype=torch.float32)
    return a[_slots(batch, rows, flat.shape[0]).clamp(min=0).long(), flat].float()


def lora_expand(y: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, ranks: torch.Tensor, rows: str) -> None:
    """Add `shrunk @ b[slot].T` to each row of `y` that has an adapter, in place.

    `y`: `[..., num_columns]`, whose rows are evenly spaced. `shrunk`: `[num_rows, max_rank]` float32. `b`:
    `[num_slots, num_columns, max_rank]`, with the adapter's scaling. Sums are float32 and rounded once to the dtype of
    `y`, before they are added.
    """
    batch = _rows()
    if batch is None:
        return
    flat = y.view(-1, y.shape[-1])
    if y.device.type == "cuda":
        from piecegraph.runner.lora.kernels.shrink_expand import expand_on_gpu

        expand_on_gpu(flat, shrunk, b, ranks, _slots(batch, rows, flat.shape[0]))
        return
    for slot, index in batch.groups(rows, flat.shape[0]):
        rank = int(ranks[slot])
        if rank:
            added = (shrunk[index, :rank] @ b[slot, :, :rank].float().T).to(y.dtype)
            flat[index] += added


def _rows() -> LoraRows | None:
    """Return the slots of the rows of this step; None: it has no adapter."""
    context = current_context()
    return context.lora if isinstance(context, ForwardContext) else None


def _slots(batch: LoraRows, rows: str, num_rows: int) -> torch.Tensor:
    slots = batch.logits if rows == LOGITS else batch.tokens
    assert slots.shape[0] >= num_rows, f"{num_rows} rows of {rows}, and the slots of {slots.shape[0]}"
    return slots[:num_rows]


LORA_SHRINK = define_op(
    "lora_shrink(Tensor x, Tensor a, Tensor ranks, str rows) -> Tensor",
    lora_shrink,
    lambda x, a, ranks, rows: x.new_empty((x.numel() // x.shape[-1], a.shape[1]), dtype=torch.float32),
)
LORA_LOOKUP = define_op(
    "lora_lookup(Tensor ids, Tensor a, Tensor ranks, str rows) -> Tensor",
    lora_lookup,
    lambda ids, a, ranks, rows: a.new_empty((ids.numel(), a.shape[2]), dtype=torch.float32),
)
LORA_EXPAND = define_op(
    "lora_expand(Tensor(a!) y, Tensor shrunk, Tensor b, Tensor ranks, str rows) -> ()",
    lora_expand,
    lambda y, shrunk, b, ranks, rows: None,
)
