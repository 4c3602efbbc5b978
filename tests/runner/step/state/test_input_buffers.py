"""A step's metadata describes the fixed buffers for each group of layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from piecegraph.runner.step.state.input_buffers import InputBuffers, dummy_batch


def make(num_groups: int) -> InputBuffers:
    return InputBuffers(
        max_num_tokens=7, max_num_reqs=3, max_blocks=5, num_groups=num_groups, device=torch.device("cpu")
    )


@pytest.mark.parametrize("num_groups", [1, 3])
def test_each_group_sees_its_part_of_the_buffers(num_groups: int) -> None:
    """Views at 16-byte boundaries, which a kernel compiled for one group finds in every other."""
    inputs = make(num_groups)
    metadata = inputs.metadata(num_tokens=6, num_reqs=2, max_query_len=4, num_decode_reqs=0)
    assert len(metadata.groups) == num_groups
    for number, group in enumerate(metadata.groups):
        inputs.block_table[number], inputs.slot_mapping[number] = number, 10 + number
        assert group.block_table.shape == (2, 5) and (group.block_table == number).all()
        assert group.slot_mapping.shape == (6,) and (group.slot_mapping == 10 + number).all()
        assert group.block_table.data_ptr() % 16 == group.slot_mapping.data_ptr() % 16 == 0
        rest = replace(group, block_table=metadata.groups[0].block_table, slot_mapping=metadata.groups[0].slot_mapping)
        assert rest == metadata.groups[0]


def test_there_is_one_host_batch_per_group() -> None:
    metadata = dummy_batch(make(3), num_tokens=6, max_model_len=4, with_host_batch=True)
    hosts = [group.host for group in metadata.groups]
    assert all(host is not None and host.block_table.shape == (2, 5) for host in hosts)
    with pytest.raises(AssertionError, match="1 hosts; 3 groups"):
        make(3).metadata(num_tokens=1, num_reqs=1, max_query_len=1, num_decode_reqs=1, hosts=[hosts[0]])  # type: ignore[list-item]
