"""A step's tokens are recorded for requests that sampled, and progress for all of its batch."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.input_buffers import InputBuffers
from piecegraph.runner.prepare_inputs import prepare_inputs
from piecegraph.runner.record_sampled import record_sampled, record_sampled_reference
from piecegraph.runner.request_states import RequestStates
from tests.interpreter import interpreted
from tests.runner.device_state import BLOCK_SIZE, buffers, states


def after_a_step(device: str = "cpu") -> tuple[RequestStates, InputBuffers, torch.Tensor]:
    made = states(device)
    inputs = buffers(made, device)
    from piecegraph.runner.prepare_inputs import prepare_inputs_reference

    prepare_inputs_reference(made, inputs, num_tokens=8, num_reqs=4, block_size=BLOCK_SIZE)
    return made, inputs, torch.tensor([91, 92, 93, 94], device=device)


def test_who_reached_the_end_of_its_prompt_gets_its_token() -> None:
    made, inputs, sampled = after_a_step()
    record_sampled(made, inputs, sampled, num_reqs=4)
    decode, prompt, chunk, other = (made.row(name) for name in ("decode", "prompt", "chunk", "other"))
    assert made.token_ids[decode, :8].tolist() == [10, 11, 12, 13, 14, 15, 91, 0]
    assert made.token_ids[prompt, :5].tolist() == [20, 21, 22, 92, 0]
    assert made.token_ids[chunk, :9].tolist() == list(range(30, 39))
    assert made.num_computed_tokens[[decode, prompt, chunk, other]].tolist() == [6, 3, 6, 0]
    assert made.token_ids[other, :3].tolist() == [60, 61, 0]


def test_the_next_step_reads_what_was_recorded() -> None:
    made, inputs, sampled = after_a_step()
    record_sampled(made, inputs, sampled, num_reqs=4)
    inputs.fill([made.row("prompt"), made.row("decode")], [1, 1])
    prepare_inputs(made, inputs, num_tokens=2, num_reqs=2, block_size=BLOCK_SIZE)
    assert inputs.input_ids[:2].tolist() == [92, 91]
    assert inputs.positions[:2].tolist() == [3, 6]


def test_recording_again_replaces_the_tokens() -> None:
    """A graph records the likeliest; a sampler that drew others records those over it."""
    made, inputs, sampled = after_a_step()
    record_sampled(made, inputs, sampled, num_reqs=4)
    record_sampled(made, inputs, sampled - 50, num_reqs=4)
    assert made.token_ids[made.row("decode"), :8].tolist() == [10, 11, 12, 13, 14, 15, 41, 0]
    assert made.num_computed_tokens[made.row("decode")] == 6


def check_kernel(device: str = "cpu") -> None:
    from piecegraph.runner.kernels.record_sampled import record_sampled_on_gpu

    expected, inputs, sampled = after_a_step(device)
    record_sampled_reference(expected, inputs, sampled, num_reqs=4)
    found, inputs, sampled = after_a_step(device)
    record_sampled_on_gpu(found, inputs, sampled, num_reqs=4)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.num_computed_tokens, expected.num_computed_tokens)


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
