"""Requests' states and input buffers with a batch in them, for tests of what works on them."""

from __future__ import annotations

import torch

from piecegraph.runner.step.state.input_buffers import InputBuffers
from piecegraph.runner.step.state.request_states import RequestStates

MAX_MODEL_LEN, BLOCK_SIZE, MAX_BLOCKS = 24, 4, 6
POISON = 0x7F7F7F7F


def states(
    device: str = "cpu", *, keeps_host_blocks: bool = False, num_groups: int = 1, pages_per_block: int = 1
) -> RequestStates:
    """Rows of four requests: a decode, a whole prompt, a chunk of a prompt, and one not in the batch. Blocks of
    group `g` have numbers 10 * g higher than those of the first."""

    def blocks(*of_first: int) -> list[list[int]]:
        return [[10 * group + block for block in of_first] for group in range(num_groups)]

    made = RequestStates(
        max_num_reqs=5,
        max_model_len=MAX_MODEL_LEN,
        max_blocks=MAX_BLOCKS,
        device=torch.device(device),
        num_groups=num_groups,
        pages_per_block=pages_per_block,
        keeps_host_blocks=keeps_host_blocks,
    )
    made.add("decode", [10, 11, 12, 13, 14, 15], blocks(7, 2), num_computed_tokens=5)
    made.add("other", [60, 61], blocks(5))
    made.add("prompt", [20, 21, 22], blocks(9))
    made.add("chunk", list(range(30, 39)), blocks(4, 1, 3), num_computed_tokens=4)
    made.apply_writes()
    return made


def buffers(made: RequestStates, device: str = "cpu") -> InputBuffers:
    """Poisoned, then filled with the batch decode (1 token), prompt (3), chunk (2)."""
    num_groups, _, max_blocks = made.block_table.shape
    inputs = InputBuffers(
        max_num_tokens=16, max_num_reqs=5, max_blocks=max_blocks, num_groups=num_groups, device=torch.device(device)
    )
    inputs.poison()
    inputs.fill([made.row("decode"), made.row("prompt"), made.row("chunk")], [1, 3, 2])
    return inputs
