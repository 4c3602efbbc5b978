"""The measurement of the memory that the largest step needs on a GPU, and the dummy step that it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from piecegraph.runner.attention.interface.step_metadata import StepMetadata
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.sampling.options.protocol import SamplingBatch
from piecegraph.runner.step.model_step import ModelStep
from piecegraph.runner.step.state.input_buffers import dummy_batch

SAMPLED_LOGPROBS = 20
"""The number of log probabilities that each request of the largest step asks for: vLLM's default maximum."""

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
def measure_step(step: ModelStep, *, num_tokens: int, max_model_len: int, needs_host_batch: bool) -> int:
    """Return the bytes by which the GPU's memory in use grows, at most, while the largest step without graphs runs.

    Counted: the model on `num_tokens` tokens of requests of maximal length, attention included; logits of as many
    requests as a step can have (`step.num_logits`); sampling by temperature; and then the full sampler for all of
    them, with penalties, truncation and `SAMPLED_LOGPROBS` log probabilities each. The unit is segments of torch's
    allocator, gaps between tensors included, because the device must have whole segments free. The step runs twice:
    workspaces and loaded kernels that the first run leaves allocated stay in use and are not counted again.

    Not counted: log probabilities of prompts or of the whole vocabulary, and steps over graphs, which have their own
    memory. A stage that is not the last of a pipeline has no logits, and samples nothing.

    Mutates the input buffers and the sampler's rows; nothing is written to the KV cache, and no request's state
    changes.
    """
    device = step.buffers.input_ids.device
    run_largest_step(step, num_tokens=num_tokens, max_model_len=max_model_len, needs_host_batch=needs_host_batch)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step(step, num_tokens=num_tokens, max_model_len=max_model_len, needs_host_batch=needs_host_batch)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()
    return peak


def run_largest_step(step: ModelStep, *, num_tokens: int, max_model_len: int, needs_host_batch: bool) -> None:
    """Run the step of dummy tokens that `measure_step` measures, on any device."""
    common = prepare_step(step, num_tokens=num_tokens, max_model_len=max_model_len, needs_host_batch=needs_host_batch)
    logits, _ = step.draw(run_model(step, common))
    if step.has_logits:
        sample_every_way(step, logits)


def prepare_step(step: ModelStep, *, num_tokens: int, max_model_len: int, needs_host_batch: bool) -> StepMetadata:
    """Fill the inputs of a step of dummy tokens, and return the metadata that attention metadata is built from."""
    common = dummy_batch(
        step.buffers, num_tokens=num_tokens, max_model_len=max_model_len, with_host_batch=needs_host_batch
    )
    step.prepare(num_tokens, step.num_logits(num_tokens), num_active_loras=_num_active_loras(step))
    return common


def run_model(step: ModelStep, common: StepMetadata) -> torch.Tensor:
    """Return the logits `[num_rows, vocab_size]` of as many requests as the step can have."""
    return step.run_uncaptured(
        step.metadata_builder.build(common),
        step.num_logits(common.num_tokens),
        num_active_loras=_num_active_loras(step),
    )


def _num_active_loras(step: ModelStep) -> int:
    """Return 1 if adapters are enabled: their ops run then, although no row of a dummy batch has one."""
    return 0 if step.slot_map is None else 1


def sample_every_way(step: ModelStep, logits: torch.Tensor) -> None:
    """Run the full sampler for every row of `logits` `[num_rows, vocab_size]`. No request's state changes."""
    with rows_with_all_options(step, logits.shape[0], logits.device) as batch:
        step.sampler.sample(
            logits,
            rows=batch.rows,
            idx_mapping=batch.idx_mapping,
            positions=batch.positions,
            token_ids=batch.token_ids,
        )


@contextlib.contextmanager
def rows_with_all_options(step: ModelStep, num_rows: int, device: torch.device) -> Iterator[SamplingBatch]:
    """Give the sampler's first rows requests with all sampling options while the block runs, and free them after.

    A request has several of the `num_rows` rows of logits where there are more than requests, as with drafts.
    """
    requests = range(min(num_rows, step.buffers.max_num_reqs))
    rows = [row % len(requests) for row in range(num_rows)]
    for row in requests:
        step.sampler.add_request(row, _LARGEST_SAMPLING, seed=row, prompt_len=1, stop_token_ids=(), bad_words=())
    try:
        step.sampler.apply_staged_writes()
        yield SamplingBatch(
            rows=rows,
            idx_mapping=torch.tensor(rows, dtype=torch.int32, device=device),
            positions=torch.ones(num_rows, dtype=torch.int32, device=device),
            token_ids=step.states.token_ids,
            temperature=step.sampler.temperature,
        )
    finally:
        for row in requests:
            step.sampler.remove_request(row)
