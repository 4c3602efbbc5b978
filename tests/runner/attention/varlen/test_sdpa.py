"""Attention within sequences equals dense attention over one sequence at a time, whatever else is in the batch."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from piecegraph.runner.attention.varlen.call import EqualSequences, VarlenCall, VarlenMetadata
from piecegraph.runner.attention.varlen.sdpa import SdpaVarlen

LENS = (1, 4, 4, 7, 2)
PADDING = 3


def metadata() -> VarlenMetadata:
    starts = torch.tensor([*accumulate(LENS, initial=0)], dtype=torch.int32)
    return VarlenMetadata.of(LENS, starts, sum(LENS) + PADDING)


def test_adjacent_sequences_of_equal_length_are_one_call() -> None:
    assert metadata().equal == (
        EqualSequences(0, 1, 1),
        EqualSequences(1, 2, 4),
        EqualSequences(9, 1, 7),
        EqualSequences(16, 1, 2),
    )
    assert metadata().num_real_rows == sum(LENS)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [0, 3, 100])
@pytest.mark.parametrize("extra", ["", "softcap", "sinks"])
def test_sequences_attend_as_if_alone(is_causal: bool, window: int, extra: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = sum(LENS) + PADDING
    query, key, value = (torch.randn(rows, heads, 8, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator) if extra == "sinks" else None
    softcap = 2.0 if extra == "softcap" else 0.0
    out = torch.full((rows, 4, 8), float("nan"))
    call = VarlenCall(query, key, value, out, 0.3, is_causal, window, softcap, sinks, None, 1.0, None, "layer")
    SdpaVarlen().forward(call, metadata())
    assert not out[sum(LENS) :].any()
    for first, last in zip(accumulate(LENS, initial=0), accumulate(LENS), strict=False):
        places = torch.arange(last - first)
        distance = places[:, None] - places
        seen = torch.ones_like(distance, dtype=torch.bool)
        if is_causal:
            seen &= distance >= 0
        if window:
            seen &= distance.abs() < window
        keys, values = (each[first:last].repeat_interleave(2, dim=1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[first:last], keys) * 0.3
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
        weights = scores.softmax(-1)[..., : last - first]
        torch.testing.assert_close(out[first:last], torch.einsum("hqk,khd->qhd", weights, values))
