"""GPTQ's layout in both versions and of 4 and 8 bits, and the orders in an int32."""

from __future__ import annotations

import pytest
import torch

from piecegraph.errors import CheckpointError
from piecegraph.runner.quantization.checkpoints.gptq import AWQ_ORDER, Awq, Gptq
from piecegraph.runner.quantization.checkpoints.headers import check_tensors_of
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.packed_integers import unpacked
from tests.runner.quantization.checkpoints.written import awq, gptq, slices, words


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 64])
def test_weights_are_those_that_were_stored(bits: int, version: int, group: int) -> None:
    weight = torch.randn(40, 64)
    parts, wanted = gptq(weight, bits, group, version)
    config = {"bits": bits, "group_size": group, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    checkpoint = Gptq.of({"quant_method": "gptq", **config})
    scheme = checkpoint.scheme_of("layers.0.q_proj", "Linear")
    assert scheme is not None and checkpoint.scheme_of("lm_head", "Linear") is None
    packed = checkpoint.packed("layers.0.q_proj", parts, scheme, torch.float32)
    assert torch.allclose(METHODS[scheme.method].unpack(packed), wanted, atol=1e-5)


def test_awq_has_an_order_of_its_own() -> None:
    parts, wanted = awq(torch.randn(16, 32))
    checkpoint = Awq.of({"quant_method": "awq", "bits": 4, "group_size": 16})
    scheme = checkpoint.scheme_of("q_proj", "Linear")
    assert scheme is not None
    packed = checkpoint.packed("q_proj", parts, scheme, torch.float32)
    assert torch.allclose(METHODS[scheme.method].unpack(packed), wanted, atol=1e-5)
    channels = torch.tensor([[0x75316420]], dtype=torch.int32)  # as AutoAWQ packs the channels 0 .. 7
    assert unpacked(channels, 4, 1, AWQ_ORDER).tolist() == [list(range(8))]


def test_columns_in_another_order_are_refused() -> None:
    parts, _ = gptq(torch.randn(8, 32))
    parts["g_idx"] = parts["g_idx"].flip(0)
    checkpoint = Gptq.of({"bits": 4, "group_size": 16})
    with pytest.raises(CheckpointError, match=r"q_proj\.g_idx gives columns .*desc_act=True"):
        check_tensors_of("q_proj", slices(parts), checkpoint.tensors("q_proj", checkpoint.scheme, (8, 32), parts))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_integers_come_back(bits: int, dim: int) -> None:
    values = torch.randint(0, 2**bits, (24, 16))
    assert torch.equal(unpacked(words(values, bits, dim), bits, dim).long(), values)
