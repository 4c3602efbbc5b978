"""What a step leaves behind in the requests' states: their sampled tokens, and how far they are computed."""

from __future__ import annotations

import torch

from piecegraph.runner.input_buffers import InputBuffers
from piecegraph.runner.request_states import RequestStates


def record_sampled(states: RequestStates, buffers: InputBuffers, sampled: torch.Tensor, *, num_reqs: int) -> None:
    """Append `sampled` `[num_reqs]` (any integer type) to the tokens of the requests that sample, and
    mark every request of the batch as computed up to its `seq_lens`.

    Mutates `token_ids` and `num_computed_tokens`. A request samples iff this step reached the end of
    what was known of it; padded requests are passed over. Doing it twice is doing it once: the second time's
    tokens replace the first's.
    """
    if buffers.input_ids.device.type == "cuda":
        from piecegraph.runner.kernels.record_sampled import record_sampled_on_gpu

        record_sampled_on_gpu(states, buffers, sampled, num_reqs=num_reqs)
        return
    record_sampled_reference(states, buffers, sampled, num_reqs=num_reqs)


def record_sampled_reference(
    states: RequestStates, buffers: InputBuffers, sampled: torch.Tensor, *, num_reqs: int
) -> None:
    """What the kernel does, in torch."""
    rows = buffers.idx_mapping[:num_reqs].to(torch.int64)
    seq_lens = buffers.seq_lens[:num_reqs].to(torch.int64)
    is_real = rows >= 0
    is_sampled = is_real & (seq_lens >= states.prefill_lens[rows.clamp(min=0)])
    is_sampled &= seq_lens < states.token_ids.shape[1]  # the last token a request may have is not computed
    states.token_ids[rows[is_sampled], seq_lens[is_sampled]] = sampled[:num_reqs][is_sampled].to(torch.int32)
    states.num_computed_tokens[rows[is_real]] = seq_lens[is_real].to(torch.int32)
