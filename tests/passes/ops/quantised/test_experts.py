"""`piecegraph::quantised_experts`: what it computes for every scheme, and that only chosen experts are read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from piecegraph.compiler.torch_compat.fake_tensors import FakeTensorMode
from piecegraph.passes.ops.quantised import mxfp4
from piecegraph.passes.ops.quantised.experts import QUANTISED_EXPERTS
from tests.passes.kernels.quantised.quantised_inputs import relative_rms
from tests.passes.ops.quantised.expert_inputs import CLAMPED, SCHEMES, SILU, exact, expert_inputs

ROUNDED = {"int8": 6e-3}
"""Bounds of schemes whose kernel on a CPU rounds inputs and sums to bfloat16; of others 1e-5."""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_equals_float64(scheme: str) -> None:
    """With biases and without, with gate and up in halves and in turns, and with choices of other ranks' experts."""
    for gate, has_bias in ((SILU, False), (CLAMPED, True)):
        given = expert_inputs(scheme, gate=gate, has_bias=has_bias)
        assert relative_rms(QUANTISED_EXPERTS(*given.args), exact(given)) < ROUNDED.get(scheme, 1e-5)


@pytest.mark.parametrize(("scheme", "inputs"), [("int8", "tokens"), ("e4m3", "tokens"), ("e4m3 in blocks", "groups")])
def test_inputs_are_rounded_where_the_checkpoint_says_so(scheme: str, inputs: str) -> None:
    """A value between two steps may go either way, so a few of the second product's differ."""
    given = expert_inputs(scheme, inputs=inputs)
    found, wanted = QUANTISED_EXPERTS(*given.args), exact(given)
    assert relative_rms(found, wanted) < 1e-2
    assert relative_rms(found, exact(replace(given, inputs="floats"))) > 2 * relative_rms(found, wanted)


def test_experts_that_no_token_chose_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 experts two are chosen: two matrices each become floats, one at a time."""
    sizes = []
    own = mxfp4.dequantised

    def watched(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(tuple(packed.shape))
        return own(packed, scale, dtype)

    given = expert_inputs("mxfp4")
    given = replace(given, topk_ids=torch.tensor([[1, 3]] * 4 + [[3, 1]]))
    monkeypatch.setattr(mxfp4, "dequantised", watched)
    QUANTISED_EXPERTS(*given.args)
    assert sizes == [(64, 32), (64, 16)] * 2


def test_its_fake_is_like_its_result() -> None:
    given = expert_inputs("int4", dtype=torch.bfloat16)
    found = QUANTISED_EXPERTS(*given.args)
    with FakeTensorMode() as mode:
        fake = QUANTISED_EXPERTS(
            *(mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in given.args)
        )
    assert (fake.shape, fake.dtype, fake.stride()) == (found.shape, found.dtype, found.stride())
    empty = replace(given, x=given.x[:0], topk_weights=given.topk_weights[:0], topk_ids=given.topk_ids[:0])
    assert QUANTISED_EXPERTS(*empty.args).shape == (0, 64)
