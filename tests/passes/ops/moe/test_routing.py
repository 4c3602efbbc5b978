"""The op computes what transformers' routers compute, and its fake has the results' shapes."""

from __future__ import annotations

import pytest
import torch

from piecegraph.passes.ops.moe.routing import ROUTE_TOKENS


@pytest.mark.parametrize("is_normalised", [False, True])
def test_weights_are_of_the_most_probable_experts(is_normalised: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -3.0], [5.0, 5.5, -1.0, 0.0]], dtype=torch.bfloat16)
    weights, ids = ROUTE_TOKENS(logits, 2, is_normalised, torch.float32)
    assert ids.tolist() == [[1, 2], [1, 0]] and weights.dtype == torch.float32
    expected = logits.float().softmax(-1).gather(1, ids)
    if is_normalised:
        expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected)


def test_the_op_passes_torchs_checks() -> None:
    arguments = (torch.randn(5, 16, dtype=torch.bfloat16), 3, True, torch.bfloat16)
    torch.library.opcheck(ROUTE_TOKENS, arguments, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(ROUTE_TOKENS, (torch.randn(0, 16), 3, True, torch.float32), test_utils="test_faketensor")
