"""How much memory a step takes at its largest, measured on the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from piecegraph.runner.attention.metadata import PAD_SLOT_ID, AttentionMetadata, HostBatch
from piecegraph.runner.attention.step_metadata import StepMetadata
from piecegraph.runner.dummy_batch import dummy_batch
from piecegraph.runner.model_step import ModelStep
from piecegraph.runner.sampling.sampler_option import SamplingBatch
from piecegraph.runner.sampling_params import SamplingParams
from piecegraph.runner.step_memory import StepMemory

SAMPLED_LOGPROBS = 20
"""Log probabilities each request of the largest step asks for: what vLLM allows at most by default."""

MOST_OUTSIDE_BYTES = 2**29
"""That kernels which a step loads may take; more is what other processes took meanwhile."""

_LARGEST_SAMPLING = SamplingParams(
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logprobs=SAMPLED_LOGPROBS,
)


@torch.no_grad()
def measure_step(step: ModelStep, *, num_tokens: int, max_model_len: int, needs_host_batch: bool) -> StepMemory:
    """What the GPU's memory in use grows by, at most, while the largest step without graphs runs, and for good.

    Counted: the model on `num_tokens` tokens of requests as long as can be, attention included; logits of as many
    requests as a step can have (`step.num_logits`); the draw; then the sampler's whole way for all of them, with
    penalties, truncation and `SAMPLED_LOGPROBS` log probabilities each. In whole pieces of torch's allocator, the
    gaps between tensors included: that is what the device has to have free. What stays allocated after a first
    such step, as workspaces and loaded kernels do, is told apart: it is in use from then on.

    Not counted: log probabilities of prompts or of the whole vocabulary, and steps over graphs, whose memory is
    the graphs' own.

    Mutates the input buffers and the sampler's rows; nothing is cached and no request's state changes.
    """
    device = step.buffers.input_ids.device
    torch.cuda.empty_cache()
    before_first, outside_first = torch.cuda.memory_reserved(device), _outside_bytes(device)
    run_largest_step(step, num_tokens=num_tokens, max_model_len=max_model_len, needs_host_batch=needs_host_batch)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step(step, num_tokens=num_tokens, max_model_len=max_model_len, needs_host_batch=needs_host_batch)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()
    outside = min(max(_outside_bytes(device) - outside_first, 0), MOST_OUTSIDE_BYTES)
    return StepMemory(peak_bytes=peak, stays_bytes=max(before - before_first, 0) + outside)


def _outside_bytes(device: torch.device) -> int:
    """What is in use of the device, by anybody, that torch's allocator does not hold."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device)


def run_largest_step(step: ModelStep, *, num_tokens: int, max_model_len: int, needs_host_batch: bool) -> None:
    """The step that `measure_step` measures, of nobody's tokens, on any device."""
    common = prepare_step(step, num_tokens=num_tokens, max_model_len=max_model_len, needs_host_batch=needs_host_batch)
    logits, _ = step.draw(run_model(step, common))
    sample_every_way(step, logits)


def prepare_step(step: ModelStep, *, num_tokens: int, max_model_len: int, needs_host_batch: bool) -> StepMetadata:
    """The inputs of a step of nobody's tokens, and what its metadata is built of."""
    common = dummy_batch(
        step.buffers, num_tokens=num_tokens, max_model_len=max_model_len, with_host_batch=needs_host_batch
    )
    step.prepare(num_tokens, step.num_logits(num_tokens))
    return common


def run_model(step: ModelStep, common: StepMetadata) -> torch.Tensor:
    """Logits `[num_rows, vocab_size]` of as many requests as the step can have."""
    return step.run_uncaptured(step.metadata_builder.build(common), step.num_logits(common.num_tokens))


def sample_every_way(step: ModelStep, logits: torch.Tensor) -> None:
    """The sampler's whole way for every row of `logits` `[num_rows, vocab_size]`. No request's state changes."""
    with rows_that_ask_for_everything(step, logits.shape[0], logits.device) as batch:
        step.sampler.sample(
            logits,
            rows=batch.rows,
            idx_mapping=batch.idx_mapping,
            positions=batch.positions,
            token_ids=batch.token_ids,
        )


@contextlib.contextmanager
def rows_that_ask_for_everything(step: ModelStep, num_rows: int, device: torch.device) -> Iterator[SamplingBatch]:
    """The first rows of the sampler, with all that can be asked of it; they are nobody's again after the block."""
    rows = range(num_rows)
    for row in rows:
        step.sampler.add_request(row, _LARGEST_SAMPLING, seed=row, prompt_len=1, stop_token_ids=(), bad_words=())
    try:
        step.sampler.apply_staged_writes()
        yield SamplingBatch(
            rows=rows,
            idx_mapping=torch.arange(num_rows, dtype=torch.int32, device=device),
            positions=torch.ones(num_rows, dtype=torch.int32, device=device),
            token_ids=step.states.token_ids,
            temperature=step.sampler.temperature,
        )
    finally:
        for row in rows:
            step.sampler.remove_request(row)


def padding_only(num_tokens: int, device: torch.device) -> AttentionMetadata:
    """A batch of no requests, all of whose rows are padding."""
    slot_mapping = torch.full((num_tokens,), PAD_SLOT_ID, dtype=torch.int64)
    no_blocks = torch.zeros((0, 1), dtype=torch.int64)
    return AttentionMetadata(
        num_reqs=0,
        num_tokens=num_tokens,
        max_query_len=1,
        num_decode_reqs=0,
        query_start_loc=torch.zeros(1, dtype=torch.int32, device=device),
        seq_lens=torch.zeros(0, dtype=torch.int32, device=device),
        block_table=no_blocks.to(device, torch.int32),
        slot_mapping=slot_mapping.to(device),
        host=HostBatch(query_start_loc=(0,), seq_lens=(), block_table=no_blocks, slot_mapping=slot_mapping),
    )
