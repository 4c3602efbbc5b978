"""Sampling records tokens for the requests that sampled, and progress for all requests of the batch."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.sampling.gumbel_sample import gumbel_sample
from piecegraph.runner.step.prepare_inputs import prepare_inputs, prepare_inputs_reference
from piecegraph.runner.step.state.input_buffers import InputBuffers
from piecegraph.runner.step.state.request_states import RequestStates
from tests.interpreter import interpreted
from tests.runner.device_state import BLOCK_SIZE, MAX_MODEL_LEN, buffers, states

NUM_REQS = 4
VOCAB_SIZE = 300


def after_a_step(device: str = "cpu") -> tuple[RequestStates, InputBuffers]:
    """Three requests and one of padding."""
    made = states(device)
    inputs = buffers(made, device)
    prepare_inputs_reference(made, inputs, num_tokens=8, num_reqs=NUM_REQS, block_size=BLOCK_SIZE)
    return made, inputs


def draw(made: RequestStates, inputs: InputBuffers, *likeliest: int, block: int | None = None) -> torch.Tensor:
    """Sample greedily; with `block`, by the kernel with blocks of that size, on any device."""
    device = made.token_ids.device
    logits = torch.zeros(NUM_REQS, VOCAB_SIZE, device=device)
    logits[range(NUM_REQS), list(likeliest)] = 1.0
    temperature, seeds = torch.zeros(5, device=device), torch.zeros(5, dtype=torch.int64, device=device)
    at, positions, record = inputs.idx_mapping[:NUM_REQS], inputs.seq_lens[:NUM_REQS], made.token_record
    if block is None:
        return gumbel_sample(
            logits, idx_mapping=at, temperature=temperature, seeds=seeds, positions=positions, record=record
        )
    from piecegraph.runner.sampling.kernels.gumbel_sample import gumbel_sample_on_gpu

    out = torch.empty(NUM_REQS, dtype=torch.int64, device=device)
    gumbel_sample_on_gpu(logits, at, temperature, seeds, positions, out, record, block=block)
    return out


def test_a_request_at_the_end_of_its_prompt_gets_its_token() -> None:
    made, inputs = after_a_step()
    assert draw(made, inputs, 91, 92, 93, 94).tolist() == [91, 92, 93, 0]
    decode, prompt, chunk, other = (made.row(name) for name in ("decode", "prompt", "chunk", "other"))
    assert made.token_ids[decode, :8].tolist() == [10, 11, 12, 13, 14, 15, 91, 0]
    assert made.token_ids[prompt, :5].tolist() == [20, 21, 22, 92, 0]
    assert made.token_ids[chunk, :9].tolist() == list(range(30, 39))
    assert made.num_computed_tokens[[decode, prompt, chunk, other]].tolist() == [6, 3, 6, 0]
    assert made.token_ids[other, :3].tolist() == [60, 61, 0]


def test_the_next_step_reads_what_was_recorded() -> None:
    made, inputs = after_a_step()
    draw(made, inputs, 91, 92, 93, 94)
    inputs.fill([made.row("prompt"), made.row("decode")], [1, 1])
    prepare_inputs(made, inputs, num_tokens=2, num_reqs=2, block_size=BLOCK_SIZE)
    assert inputs.input_ids[:2].tolist() == [92, 91]
    assert inputs.positions[:2].tolist() == [3, 6]


def test_drawing_again_replaces_the_tokens() -> None:
    """A graph records the likeliest tokens; a sampler that drew other tokens records these over them."""
    made, inputs = after_a_step()
    draw(made, inputs, 91, 92, 93, 94)
    draw(made, inputs, 41, 42, 43, 44)
    assert made.token_ids[made.row("decode"), :8].tolist() == [10, 11, 12, 13, 14, 15, 41, 0]
    assert made.num_computed_tokens[made.row("decode")] == 6


def test_the_last_token_that_a_request_may_have_is_not_kept() -> None:
    """The last token is never computed; the next row keeps its values."""
    made, inputs = after_a_step()
    before = made.token_ids.clone()
    inputs.seq_lens[0] = MAX_MODEL_LEN
    draw(made, inputs, 91, 92, 93, 94)
    decode = made.row("decode")
    assert made.num_computed_tokens[decode] == MAX_MODEL_LEN
    before[made.row("prompt"), 3] = 92
    assert torch.equal(made.token_ids, before)


def check_kernel(device: str = "cpu") -> None:
    for seq_len in (6, MAX_MODEL_LEN):
        for block in (128, 512):  # several of a row, and one
            expected, inputs = after_a_step()
            inputs.seq_lens[0] = seq_len
            drawn = draw(expected, inputs, 91, 292, 93, 94)
            found, inputs = after_a_step(device)
            inputs.seq_lens[0] = seq_len
            assert draw(found, inputs, 91, 292, 93, 94, block=block).tolist() == drawn.tolist()
            for name, tensor in expected.tensors().items():
                assert torch.equal(found.tensors()[name].cpu(), tensor), name


def test_the_kernel_equals_the_reference() -> None:
    interpreted(check_kernel)


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_the_gpu() -> None:
    check_kernel("cuda")


def test_rows_are_freed_and_taken_again() -> None:
    made = states()
    row = made.row("prompt")
    made.remove("prompt")
    assert "prompt" not in made
    made.remove("never there")
    assert made.add("new", [1, 2], [[0]]) == row
    made.apply_writes()
    assert made.num_computed_tokens[row] == 0 and made.prefill_lens[row] == 2
