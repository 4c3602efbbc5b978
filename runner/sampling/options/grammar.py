"""Structured output's part of a step: a mask of the tokens that may come next, made outside of the runner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piecegraph.runner.device_memory.host_memory.host_copy import to_device
from piecegraph.runner.sampling.options.allowed_token_ids import apply_bitmask_reference


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GrammarOutput:
    """Rows of allowed tokens for each request that a grammar constrains in this step; other requests are free.

    A request has one row, or, with drafts, one for each of its rows of logits, in their order.

    The mask is made between `execute_model` and `sample_tokens`, while the device computes. Its maker must know all
    tokens so far, as in an engine that schedules no step before the last has ended.
    """

    bitmask: torch.Tensor  # [len(request_ids), ceil(vocab_size / 32)] int32; token t is bit t % 32 of word t // 32
    request_ids: tuple[str, ...]

    def __post_init__(self) -> None:
        shape, dtype = tuple(self.bitmask.shape), self.bitmask.dtype
        assert len(shape) == 2 and shape[0] == len(self.request_ids) and dtype is torch.int32, (
            f"bitmask is {dtype} of shape {shape}; give int32, a row for each of {len(self.request_ids)} request ids"
        )


def apply_grammar(logits: torch.Tensor, grammar: GrammarOutput, request_ids: Sequence[str]) -> torch.Tensor:
    """Return a float32 copy of `logits` `[len(request_ids), vocab_size]`, with -inf for forbidden tokens.

    `request_ids`: those of the rows, among which every request of the grammar must be as often as it has rows there.
    Waits for nothing on a GPU.
    """
    device, vocab_size = logits.device, logits.shape[1]
    assert grammar.bitmask.shape[1] * 32 >= vocab_size, (
        f"bitmask has {grammar.bitmask.shape[1]} words a row; {vocab_size} tokens need {-(-vocab_size // 32)}"
    )
    places: dict[str, list[int]] = {request_id: [] for request_id in grammar.request_ids}
    for place, request_id in enumerate(request_ids):
        if request_id in places:
            places[request_id].append(place)
    unknown = [request_id for request_id, found in places.items() if not found]
    assert not unknown, f"grammar for {unknown}, which this step does not run"
    counts = Counter(grammar.request_ids)
    uneven = [request_id for request_id, found in places.items() if len(found) != counts[request_id]]
    assert not uneven, f"grammar for {uneven} with another number of rows than the step has"
    masked = torch.empty(logits.shape, dtype=torch.float32, device=device).copy_(logits)
    if not grammar.request_ids:
        return masked
    rows_of = {request_id: iter(found) for request_id, found in places.items()}
    at = [next(rows_of[request_id]) for request_id in grammar.request_ids]
    row_of = [0] * len(request_ids)
    for row, one in enumerate(at):
        row_of[one] = row
    selected, rows = to_device(at, torch.int32, device), to_device(row_of, torch.int32, device)
    if device.type != "cuda":
        apply_bitmask_reference(masked, selected, rows, grammar.bitmask)
        return masked
    from piecegraph.runner.sampling.kernels.apply_bitmask import apply_bitmask_on_gpu

    bitmask = grammar.bitmask.contiguous()
    if bitmask.device.type == "cpu":
        bitmask = bitmask.pin_memory().to(device, non_blocking=True)
    apply_bitmask_on_gpu(masked, selected, rows, bitmask)
    return masked
