"""A step's inputs come from the requests' states alone, and padding is overwritten with what is safe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID
from piecegraph.runner.step.kernels.cpu_prepare_inputs import KERNEL, prepare_inputs_on_cpu
from piecegraph.runner.step.prepare_inputs import prepare_inputs, prepare_inputs_reference
from piecegraph.runner.step.state.input_buffers import InputBuffers
from tests.cpp_kernels import needs_cpp_compiler, use_kernel
from tests.interpreter import interpreted
from tests.runner.device_state import BLOCK_SIZE, POISON, buffers, states

FIELDS = ("input_ids", "positions", "slot_mapping", "seq_lens", "block_table", "logits_indices", "query_start_loc")


def prepared(num_tokens: int, num_reqs: int) -> InputBuffers:
    made = states()
    inputs = buffers(made)
    prepare_inputs(made, inputs, num_tokens=num_tokens, num_reqs=num_reqs, block_size=BLOCK_SIZE)
    return inputs


def test_a_mixed_batch() -> None:
    inputs = prepared(6, 3)
    assert inputs.input_ids[:6].tolist() == [15, 20, 21, 22, 34, 35]
    assert inputs.positions[:6].tolist() == [5, 0, 1, 2, 4, 5]
    assert inputs.slot_mapping[0, :6].tolist() == [2 * 4 + 1, 36, 37, 38, 1 * 4 + 0, 1 * 4 + 1]
    assert inputs.seq_lens[:3].tolist() == [6, 3, 6]
    assert inputs.query_start_loc[:4].tolist() == [0, 1, 4, 6]
    assert inputs.logits_indices[:3].tolist() == [0, 3, 5]
    assert inputs.block_table[0, 0, :2].tolist() == [7, 2]


def test_padding_is_overwritten_and_nothing_else_is() -> None:
    """Rows and requests beyond the batch get safe values up to the padded counts; the rest stays poisoned."""
    inputs = prepared(8, 4)
    assert inputs.input_ids[6:8].tolist() == inputs.positions[6:8].tolist() == [0, 0]
    assert inputs.slot_mapping[0, 6:8].tolist() == [PAD_SLOT_ID, PAD_SLOT_ID]
    assert int(inputs.seq_lens[3]) == int(inputs.logits_indices[3]) == 0
    assert inputs.query_start_loc[3:].tolist() == [6, 6, 6]
    assert (inputs.block_table[0, 0, 2:] == POISON).all() and (inputs.block_table[0, 3] == POISON).all()
    assert inputs.input_ids[8] == inputs.slot_mapping[0, 8] == (POISON << 32) + POISON
    assert inputs.seq_lens[4] == POISON


def test_requests_without_a_row_are_dummies() -> None:
    """A dummy batch runs every kernel a real one would, and caches nothing."""
    made = states()
    inputs = buffers(made)
    inputs.fill([-1, made.row("prompt"), -1], [6, 2, 1])
    prepare_inputs(made, inputs, num_tokens=10, num_reqs=4, block_size=BLOCK_SIZE)
    assert inputs.input_ids[:10].tolist() == [0] * 6 + [20, 21] + [0, 0]
    assert inputs.positions[:10].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 0, 0]
    assert inputs.slot_mapping[0, :10].tolist() == [PAD_SLOT_ID] * 6 + [36, 37] + [PAD_SLOT_ID] * 2
    assert inputs.seq_lens[:4].tolist() == [6, 2, 1, 0]
    assert inputs.logits_indices[:4].tolist() == [5, 7, 8, 0]
    assert inputs.block_table[0, 0, :3].tolist() == [0, 0, POISON]


def test_buffers_have_the_documented_dtypes() -> None:
    inputs = prepared(6, 3)
    for name in ("input_ids", "positions", "slot_mapping", "logits_indices"):
        assert getattr(inputs, name).dtype == torch.int64, name
    for name in ("seq_lens", "block_table", "query_start_loc", "idx_mapping"):
        assert getattr(inputs, name).dtype == torch.int32, name


def test_each_group_has_its_own_slots_and_blocks() -> None:
    """All other tensors are written once, whatever the number of groups."""
    one, made = prepared(8, 4), states(num_groups=3)
    inputs = buffers(made)
    prepare_inputs(made, inputs, num_tokens=8, num_reqs=4, block_size=BLOCK_SIZE)
    for name in ("input_ids", "positions", "seq_lens", "logits_indices"):
        assert torch.equal(getattr(inputs, name), getattr(one, name)), name
    for group in range(3):
        assert inputs.block_table[group, 0, :3].tolist() == [10 * group + 7, 10 * group + 2, POISON]
        real = one.slot_mapping[0, :6] + 10 * group * BLOCK_SIZE
        assert torch.equal(inputs.slot_mapping[group, :6], real)
        assert inputs.slot_mapping[group, 6:8].tolist() == [PAD_SLOT_ID, PAD_SLOT_ID]


def test_a_block_is_several_pages_of_the_kernels() -> None:
    """Blocks of 4 tokens are allocated, kernels see blocks of 2: the same tokens lie at the same slots."""
    made = states(pages_per_block=2)
    inputs, whole = buffers(made), prepared(6, 3)
    prepare_inputs(made, inputs, num_tokens=6, num_reqs=3, block_size=BLOCK_SIZE // 2)
    assert inputs.block_table[0, 0, :4].tolist() == [14, 15, 4, POISON]
    assert inputs.block_table[0, 1, :3].tolist() == [18, 19, POISON]
    assert torch.equal(inputs.slot_mapping, whole.slot_mapping)


def check_triton_kernel(device: str = "cpu") -> None:
    from piecegraph.runner.step.kernels.prepare_inputs import prepare_inputs_on_gpu

    check_kernel(prepare_inputs_on_gpu, device)


def check_kernel(run_kernel: Callable[..., object], device: str = "cpu") -> None:
    """The kernel writes what the reference writes, to the byte."""
    for num_groups, num_tokens, num_reqs in ((1, 6, 3), (1, 8, 4), (1, 16, 5), (3, 8, 4), (3, 16, 5)):
        made = states(device, num_groups=num_groups)
        expected, found = buffers(made, device), buffers(made, device)
        size = {"num_tokens": num_tokens, "num_reqs": num_reqs, "block_size": BLOCK_SIZE}
        prepare_inputs_reference(made, expected, **size)
        run_kernel(made, found, **size)
        for name in FIELDS:
            assert torch.equal(getattr(found, name), getattr(expected, name)), (name, num_groups, size)
        for inputs in (expected, found):
            inputs.fill([-1, made.row("prompt"), -1], [6, 2, 1])
        size |= {"num_tokens": 12, "num_reqs": 4}
        prepare_inputs_reference(made, expected, **size)
        run_kernel(made, found, **size)
        for name in FIELDS:
            assert torch.equal(getattr(found, name), getattr(expected, name)), (name, num_groups, "dummy requests")


@needs_cpp_compiler
def test_the_kernel_for_a_cpu_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel(KERNEL, monkeypatch)
    check_kernel(prepare_inputs_on_cpu)


def test_the_kernel_equals_the_reference() -> None:
    interpreted(check_triton_kernel)


@pytest.mark.gpu
def test_the_kernel_equals_the_reference_on_the_gpu() -> None:
    check_triton_kernel("cuda")


def test_the_same_batch_twice_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = states()
    inputs = buffers(made)
    copies: list[object] = []

    def counted(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        copies.append(values)
        return torch.tensor(values, dtype=dtype)

    monkeypatch.setattr("piecegraph.runner.step.state.input_buffers.to_device", counted)
    inputs.fill([made.row("decode"), made.row("prompt"), made.row("chunk")], [1, 3, 2])
    assert not copies
    inputs.fill([made.row("decode")], [1])
    inputs.fill([made.row("decode")], [1])
    assert len(copies) == 1
    assert inputs.idx_mapping.tolist() == [made.row("decode"), -1, -1, -1, -1]
    assert inputs.query_start_loc.tolist() == [0, 1, 1, 1, 1, 1]
