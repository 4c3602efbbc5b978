"""The ops of adapters: `lora_shrink` and `lora_lookup`, which make a few numbers of each row, and `lora_expand`.

A row is a token, or a row of logits. `LoraRows`, which the runner sets for a step, says which slot of the stacked
matrices holds the adapter of each row, if any. In a step without adapters the ops do nothing: they launch nothing, and
what `lora_shrink` returns is undefined and unread. So a graph that is captured for such steps holds none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import torch

from piecegraph.passes.ops.library import define_op

TOKENS, LOGITS = "tokens", "logits"
"""The kinds of rows that a module computes."""


class LoraRows:
    """The slots of the adapters of a step's rows, views of buffers at fixed addresses; -1: the row has no adapter."""

    __slots__ = ("_groups", "logits", "tokens")

    def __init__(self, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        self.tokens = tokens  # [num_tokens] int32
        self.logits = logits  # [num_logits] int32
        self._groups: dict[tuple[str, int], list[tuple[int, torch.Tensor]]] = {}

    def groups(self, kind: str, num_rows: int) -> Sequence[tuple[int, torch.Tensor]]:
        """Return each slot in the first `num_rows` rows of a kind ("tokens", "logits") with the indices of its rows.

        Reads the tensors at the first call, once for all layers of a step; for the CPU only.
        """
        found = self._groups.get((kind, num_rows))
        if found is None:
            slots = (self.logits if kind == "logits" else self.tokens)[:num_rows]
            assert slots.shape[0] == num_rows, f"{num_rows} rows of {kind}, and the slots of {slots.shape[0]}"
            found = [(slot, (slots == slot).nonzero()[:, 0]) for slot in sorted(set(slots.tolist())) if slot >= 0]
            self._groups[kind, num_rows] = found
        return found


_current: ContextVar[LoraRows | None] = ContextVar("piecegraph_lora_rows", default=None)


def set_lora_rows(rows: LoraRows | None) -> None:
    """Make `rows` those of the step that runs now in this thread; None: the step has no adapter, or is over."""
    _current.set(rows)


def lora_shrink(x: torch.Tensor, a: torch.Tensor, ranks: torch.Tensor, rows: str) -> torch.Tensor:
    """Return `x @ a[slot].T` of each row, `[num_rows, max_rank]` float32, a new tensor.

    `x`: `[..., size]`. `a`: `[num_slots, max_rank, size]`. `ranks`: `[num_slots]` int32, how many rows of `a[slot]`
    there are; columns behind them, and rows without an adapter, are undefined. Nothing is mutated.
    """
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    out = flat.new_empty((flat.shape[0], a.shape[1]), dtype=torch.float32)
    batch = _current.get()
    if batch is None:
        return out
    if out.device.type == "cuda":
        from piecegraph.passes.kernels.lora.shrink_expand import shrink_on_gpu

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
    batch = _current.get()
    if batch is None:
        return a.new_empty((flat.shape[0], a.shape[2]), dtype=torch.float32)
    return a[_slots(batch, rows, flat.shape[0]).clamp(min=0).long(), flat].float()


def lora_expand(y: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, ranks: torch.Tensor, rows: str) -> None:
    """Add `shrunk @ b[slot].T` to each row of `y` that has an adapter, in place.

    `y`: `[..., num_columns]`, whose rows are evenly spaced. `shrunk`: `[num_rows, max_rank]` float32. `b`:
    `[num_slots, num_columns, max_rank]`, with the adapter's scaling. Sums are float32 and rounded once to the dtype of
    `y`, before they are added.
    """
    batch = _current.get()
    if batch is None:
        return
    flat = y.view(-1, y.shape[-1])
    if y.device.type == "cuda":
        from piecegraph.passes.kernels.lora.shrink_expand import expand_on_gpu

        expand_on_gpu(flat, shrunk, b, ranks, _slots(batch, rows, flat.shape[0]))
        return
    for slot, index in batch.groups(rows, flat.shape[0]):
        rank = int(ranks[slot])
        if rank:
            added = (shrunk[index, :rank] @ b[slot, :, :rank].float().T).to(y.dtype)
            flat[index] += added


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
