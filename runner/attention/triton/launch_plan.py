"""The layout, grid and numbers with which any batch of one head shape is launched, computed once."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from piecegraph.passes.kernels.common.gpu_limits import GpuLimits
from piecegraph.runner.attention.triton.kernels.decode import decode_grid
from piecegraph.runner.attention.triton.kernels.launch import Grid
from piecegraph.runner.attention.triton.layouts.decode_config import DecodeConfig, decode_config
from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape
from piecegraph.runner.attention.triton.layouts.prefill_config import LONG_QUERY_LEN, PrefillConfig, prefill_config


class DecodeLaunch(NamedTuple):
    """The layout, grid and numbers of a decode launch for one number of requests."""

    layout: int  # index in `LaunchPlan.decode_layouts`
    grid: Grid
    num_reqs: int
    num_splits: int
    min_split_len: int
    few_splits: int


class LaunchPlan(NamedTuple):
    """The launches of any batch of one head shape, the same for all layers and buckets."""

    decodes: tuple[DecodeLaunch, ...]  # by the number of requests, less one
    decode_layouts: tuple[tuple[int, DecodeConfig], ...]  # the fewest requests of the layout, and the layout
    prefills: tuple[int, ...]  # by max_query_len: index in `prefill_layouts`
    prefill_layouts: tuple[PrefillConfig, ...]


@lru_cache(maxsize=64)
def launch_plan(shape: HeadShape, max_num_reqs: int, max_len: int, gpu: GpuLimits) -> LaunchPlan:
    """Return the plan for batches of up to `max_num_reqs` requests of up to `max_len` tokens each."""
    numbers: dict[object, int] = {}
    decodes: list[DecodeLaunch] = []
    decode_layouts: list[tuple[int, DecodeConfig]] = []
    for num_reqs in range(1, max_num_reqs + 1):
        config = decode_config(
            shape,
            num_reqs=num_reqs,
            max_len=max_len,
            num_sms=gpu.num_sms,
            shared_bytes=gpu.shared_bytes,
            can_overlap=gpu.can_overlap,
        )
        if config.compiled_for not in numbers:
            numbers[config.compiled_for] = len(numbers)
            decode_layouts.append((num_reqs, config))
        grid = decode_grid(shape, num_reqs, config)
        decodes.append(
            DecodeLaunch(
                numbers[config.compiled_for], grid, num_reqs, config.num_splits, config.min_split_len, config.few_splits
            )
        )
    prefills = [
        prefill_config(shape, max_query_len=max_query_len, shared_bytes=gpu.shared_bytes)
        for max_query_len in range(LONG_QUERY_LEN + 1)
    ]
    prefill_layouts = tuple(dict.fromkeys(prefills))
    return LaunchPlan(
        tuple(decodes), tuple(decode_layouts), tuple(map(prefill_layouts.index, prefills)), prefill_layouts
    )
