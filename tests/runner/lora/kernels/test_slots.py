"""The slots of a step's rows: the kernel equals its torch reference in Triton's interpreter, and compiles for sm_90."""

from __future__ import annotations

import torch

from piecegraph.runner.lora.kernels import slots as kernels
from piecegraph.runner.lora.slot_map import slots_reference
from tests.compiled_for_gpu import compile_for_gpu
from tests.interpreter import interpreted


def slots() -> None:
    idx_mapping = torch.tensor([2, -1, 0, 1, -1], dtype=torch.int32)
    query_start_loc = torch.tensor([0, 1, 3, 7, 9, 9], dtype=torch.int32)
    of_request = torch.tensor([4, -1, 1], dtype=torch.int32)
    found = []
    for fill in (kernels.slots_on_gpu, slots_reference):
        tokens, logits = (torch.full((12,), 99, dtype=torch.int32) for _ in range(2))
        fill(idx_mapping, query_start_loc, of_request, tokens, logits, 11, 5)
        found.append((tokens.tolist(), logits.tolist()))
    assert found[0] == found[1]
    assert found[0][0] == [1, -1, -1, 4, 4, 4, 4, -1, -1, -1, -1, 99]
    assert found[0][1][:6] == [1, -1, 4, -1, -1, 99]


def test_each_row_has_the_slot_of_its_request() -> None:
    """Padded rows and requests, and requests without a state row, have none."""
    interpreted(slots)


def test_the_slots_compile_for_hopper() -> None:
    names = ("idx_mapping", "query_start_loc", "of_request", "tokens", "logits")
    tensors = {name: torch.empty(0, dtype=torch.int32) for name in names}
    arguments = {**tensors, "num_reqs": 3, "num_tokens": 16, "BLOCK": kernels.BLOCK}
    assert "st.global" in compile_for_gpu(kernels._slots, arguments, {})
