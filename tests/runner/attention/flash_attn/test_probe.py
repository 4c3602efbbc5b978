"""A kernel is tried before it is chosen: one that raises, or is wrong, or reads what nobody wrote, is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from piecegraph.runner.attention.flash_attn import probe as flash_attn_probe
from piecegraph.runner.attention.flash_attn.choice import FlashAttnKernels
from piecegraph.runner.attention.flash_attn.kernels import (
    DecodeBatch,
    FlashAttn2,
    FlashAttn4,
    FlashKernel,
    RaggedBatch,
)
from piecegraph.runner.attention.flash_attn.packages import Family
from piecegraph.runner.attention.flash_attn.probe import failure, refusals
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.op_call import AttentionCall
from tests.runner.attention.flash_attn.flash_attn_fakes import FakeFlashAttn2, fake_flash_attn_4

CPU = torch.device("cpu")

LAYER = AttentionLayer(
    name="layers.0", num_q_heads=4, num_kv_heads=2, key_dim=16, value_dim=16, dtype=torch.float16, scale=0.25,
    window=0, softcap=0.0, has_sinks=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _forget() -> None:
    flash_attn_probe._tried.cache_clear()


@pytest.mark.parametrize("layer", [LAYER, replace(LAYER, window=3, softcap=5.0)])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_right_kernel_passes(phase: str, layer: AttentionLayer) -> None:
    assert failure(FlashAttn2(FakeFlashAttn2()), phase, layer, 256, CPU) is None


@pytest.mark.parametrize("block_size", [2, 16])
def test_pages_may_be_shorter_than_the_request(block_size: int) -> None:
    layer = replace(LAYER, has_sinks=True)
    assert failure(FlashAttn4(fake_flash_attn_4), "prefill", layer, block_size, CPU) is None


def test_a_wrong_result_is_reported() -> None:
    """Here of a kernel that has no windows."""

    class NoWindow(FlashAttn2):
        def decode(self, call: AttentionCall, kv_cache: KVCache, batch: DecodeBatch) -> None:
            super().decode(call._replace(window=0), kv_cache, batch)

    kernel = NoWindow(FakeFlashAttn2())
    found = failure(kernel, "decode", replace(LAYER, window=2), 256, CPU)
    assert found is not None
    assert found.startswith("its decode is wrong here: relative error ")
    assert failure(kernel, "prefill", replace(LAYER, window=2), 256, CPU) is None


def test_reading_beyond_a_requests_end_is_reported() -> None:
    """A NaN there spreads, whatever weight it has."""

    class WholePages(FlashAttn4):
        def prefill(self, call: AttentionCall, kv_cache: KVCache, batch: RaggedBatch) -> None:
            super().prefill(call, kv_cache, batch)
            call.out.add_((kv_cache.value.flatten(0, 1) * 0).sum(0).repeat_interleave(2, dim=0))

    found = failure(WholePages(fake_flash_attn_4), "prefill", LAYER, 16, CPU)
    assert found == "its prefill is wrong here: relative error nan"


def test_an_exception_is_a_reason_and_each_kind_of_layer_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Family] = []

    def load(family: Family) -> FlashKernel:
        loads.append(family)
        if family is Family.FA4:
            raise RuntimeError("This flash attention build does not support paged KV.\nand a long trace")
        return FlashAttn2(FakeFlashAttn2())

    monkeypatch.setattr(flash_attn_probe, "load_kernel", load)
    layers = [LAYER, replace(LAYER, name="layers.1"), replace(LAYER, name="layers.2", window=3)]
    kernels = FlashAttnKernels(prefill=Family.FA4, decode=Family.FA2)
    for _ in range(2):
        assert refusals(kernels, layers, 256, CPU) == {
            Family.FA4: "its prefill failed here: RuntimeError: This flash attention build does not support paged KV."
        }
    assert loads == [Family.FA4, Family.FA2, Family.FA2]


def test_our_own_kernel_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn_probe, "load_kernel", lambda family: FlashAttn4(fake_flash_attn_4))
    kernels = FlashAttnKernels(prefill=Family.FA4, decode=Family.TRITON)
    assert refusals(kernels, [LAYER], 16, CPU) == {}
