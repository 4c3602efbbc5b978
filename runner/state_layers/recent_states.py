"""The last states of each request, kept so that a step can be taken back to a token that it computed.

A step that verifies drafts computes tokens of which some may be rejected. It keeps the state after each of them outside
the blocks of the cache: the state after the token at position `p` lies in place `p % num_places` of the request's row.
So a request can go on after any of its last `num_places` tokens, and no step has to know which drafts were accepted.

The blocks of the cache hold two kinds of states: those at the end of prompts, where decoding begins, and those at block
boundaries, for requests with the same prefix. A state at a boundary that was computed from a rejected draft is written
again once the token at that place is final. Other requests find a block only after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from piecegraph.errors import OutOfMemory, is_out_of_memory
from piecegraph.runner.attention.interface.metadata import HostBatch
from piecegraph.runner.state_layers.layer import StateLayer

RecentStates = Mapping[str, tuple[torch.Tensor, ...]]
"""By the layer's name, its tensors, each `[num_rows * num_places, *shape of a state]`."""


def allocate_recent_states(layers: Sequence[StateLayer], num_rows: int, device: torch.device) -> RecentStates:
    """Return tensors for the last `1 + rollback` states of `num_rows` requests, for layers with a rollback.

    Raises `OutOfMemory`, with the bytes they would take.
    """
    kept = [layer for layer in layers if layer.rollback]
    try:
        return {
            layer.name: tuple(
                torch.zeros((num_rows * (1 + layer.rollback), *state.shape), dtype=state.dtype, device=device)
                for state in layer.states
            )
            for layer in kept
        }
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        num_bytes = sum(num_rows * (1 + layer.rollback) * state.num_bytes for layer in kept for state in layer.states)
        raise OutOfMemory(
            f"drafts need the last {1 + kept[0].rollback} states of {num_rows} requests in {len(kept)} layers, which "
            f"take {num_bytes / 2**30:.2f} GiB, more than {device} has left ({error}). Lower max_num_seqs or "
            "num_speculative_tokens."
        ) from error


def place_of(row: int, position: int, num_places: int) -> int:
    """Return where the state after the token at `position` of the request in `row` lies."""
    return row * num_places + position % num_places


@dataclass(frozen=True, slots=True)
class DecodingRows:
    """Which requests of a batch decode, and where their last states are."""

    num_places: int  # of a request
    idx_mapping: torch.Tensor  # [max_num_reqs] int32: the state row of each request of the batch; -1: padding
    prefill_lens: torch.Tensor  # [rows] int32: a request decodes from this position on

    def of_batch(self, num_reqs: int, host: HostBatch | None) -> tuple[Sequence[int], Sequence[int]]:
        """Return the row of each request of the batch, and the position from which it decodes.

        Waits for the device unless `host` is given, whose rows may be empty for a batch of dummy tokens.
        """
        if host is not None:
            return (host.rows, host.prefill_lens) if host.rows else ([-1] * num_reqs, [0] * num_reqs)
        rows = self.idx_mapping[:num_reqs]
        return rows.tolist(), self.prefill_lens[rows.long().clamp(min=0)].tolist()
