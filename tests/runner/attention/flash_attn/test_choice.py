"""Which flash-attn kernels are chosen for prefill and decode, and what is said about the others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch

from piecegraph.runner.attention.flash_attn.choice import FlashAttnKernels, choose_kernels
from piecegraph.runner.attention.flash_attn.packages import Family
from piecegraph.runner.attention.interface.backend import AttentionCGSupport
from piecegraph.runner.attention.interface.layer import AttentionLayer

FA2, FA3, FA4, TRITON = Family.FA2, Family.FA3, Family.FA4, Family.TRITON
AMPERE, HOPPER, BLACKWELL, GEFORCE = (8, 0), (9, 0), (10, 0), (12, 0)

LAYER = AttentionLayer(
    name="layers.0", num_q_heads=16, num_kv_heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16, scale=1.0,
    window=0, softcap=0.0, has_sinks=False,
)  # fmt: skip


def choose(
    here: Collection[Family],
    capability: tuple[int, int] = HOPPER,
    block_size: int = 16,
    **layer: Any,
) -> FlashAttnKernels | str:
    installed = {family: None if family in (*here, TRITON) else "not installed: pip install it" for family in Family}
    return choose_kernels(installed, capability, [replace(LAYER, **layer)], block_size)


@pytest.mark.parametrize(
    ("here", "capability", "block_size", "prefill", "decode"),
    [
        ({FA2}, AMPERE, 256, FA2, FA2),
        ({FA2}, HOPPER, 512, FA2, FA2),
        ({FA3}, HOPPER, 16, FA3, FA3),
        ({FA4}, HOPPER, 16, FA4, TRITON),
        ({FA4}, BLACKWELL, 32, FA4, TRITON),
        ({FA2, FA4}, HOPPER, 16, FA4, TRITON),
        ({FA2, FA4}, HOPPER, 256, FA4, FA2),
        ({FA2, FA4}, GEFORCE, 256, FA2, FA2),
        ({FA2, FA3, FA4}, HOPPER, 16, FA3, FA3),
        ({FA2, FA3, FA4}, HOPPER, 256, FA4, FA2),
    ],
)
def test_the_best_that_can_run_is_chosen_for_each(
    here: set[Family], capability: tuple[int, int], block_size: int, prefill: Family, decode: Family
) -> None:
    kernels = choose(here, capability, block_size)
    assert isinstance(kernels, FlashAttnKernels), kernels
    assert (kernels.prefill, kernels.decode) == (prefill, decode)
    assert kernels.notes[0] == f"prefill by {prefill.value}, decode by {decode.value}"


@pytest.mark.parametrize(
    ("here", "options", "reason"),
    [
        ((), {}, "flash-attn 4: not installed: pip install it."),
        ({FA2}, {}, "flash-attn 2: its pages hold a multiple of 256 tokens and block_size is 16: give block_size=256."),
        ({FA2}, {"capability": (7, 5), "block_size": 256}, "needs compute capability 8.0, and this GPU has compute"),
        ({FA3}, {"capability": BLACKWELL}, "flash-attn 3: it runs on Hopper alone (9.0), and this GPU has"),
        ({FA3}, {"block_size": 64}, "flash-attn 3: it may load pages of 64 tokens and more beyond a request's end"),
        (
            {FA4},
            {"capability": AMPERE},
            "has paged K/V on Hopper and Blackwell (9.x to 11.x), and this GPU has compute ",
        ),
        ({FA4}, {"block_size": 128}, "it loads pages of 128 tokens beyond a request's end: give block_size=16, 32"),
        ({FA4}, {"is_latent": True}, "flash-attn 4: layers.0 keeps latents, whose values are part of its keys."),
        ({FA4}, {"chunk_size": 8}, "flash-attn 4: layers.0 attends within chunks, and it has windows."),
        (
            {FA2},
            {"block_size": 256, "has_slopes": True},
            "flash-attn 2: layers.0 adds a bias by position to its scores",
        ),
        ({FA2}, {"block_size": 256, "has_sinks": True}, "flash-attn 2: layers.0 has sinks, and it none."),
        ({FA2}, {"block_size": 256, "dtype": torch.float32}, "layers.0 computes in torch.float32; it has torch.bfloat"),
        ({FA2}, {"block_size": 256, "key_dim": 192}, "heads of 192 (keys) and 128 (values); it takes equal ones"),
        ({FA2}, {"block_size": 256, "key_dim": 84, "value_dim": 84}, "it takes equal ones, a multiple of 8 up to 256"),
        ({FA4}, {"key_dim": 72, "value_dim": 72}, "it takes multiples of 16 up to 256"),
        ({FA4}, {"capability": BLACKWELL, "key_dim": 160, "value_dim": 160}, "it takes multiples of 16 up to 128"),
        ({FA4}, {"num_q_heads": 512, "num_kv_heads": 1}, "flash-attn 4 could prefill, but nothing decode."),
    ],
)
def test_what_cannot_run_has_a_reason_that_says_what_to_do(
    here: Collection[Family], options: dict[str, Any], reason: str
) -> None:
    found = choose(here, **options)
    assert isinstance(found, str)
    assert reason in found


@pytest.mark.parametrize(
    "options",
    [
        {"has_sinks": True},
        {"window": 128, "softcap": 30.0},
        {"key_dim": 192},
        {"key_dim": 256, "value_dim": 256},
        {"capability": BLACKWELL, "key_dim": 192},
        {"capability": BLACKWELL, "key_dim": 256, "value_dim": 256},
    ],
)
def test_flash_attn_4_takes_what_it_has(options: dict[str, Any]) -> None:
    kernels = choose({FA2, FA4}, block_size=256, **options)
    assert isinstance(kernels, FlashAttnKernels), kernels
    assert kernels.prefill is FA4


def test_a_mix_reports_why_each_other_kernel_was_not_chosen() -> None:
    kernels = choose({FA2, FA4}, has_sinks=True, block_size=256)
    assert isinstance(kernels, FlashAttnKernels)
    assert kernels.notes == (
        "prefill by flash-attn 4, decode by triton",
        "not flash-attn 3: not installed: pip install it",
        "not flash-attn 2: layers.0 has sinks, and it none",
        "flash-attn 4 compiles 2-3 s for a kind of layer when it is chosen, before graphs are captured",
    )


def test_every_layer_must_fit() -> None:
    installed = dict.fromkeys(Family)
    odd = replace(LAYER, name="layers.1", key_dim=24, value_dim=40)
    found = choose_kernels(installed, HOPPER, [LAYER, odd], 16)
    assert isinstance(found, str)
    assert "layers.1 has heads of 24 (keys) and 40 (values)" in found


def test_without_triton_nothing_writes_keys_and_values() -> None:
    installed = {**dict.fromkeys(Family), TRITON: "not installed: pip install triton"}
    found = choose_kernels(installed, HOPPER, [LAYER], 16)
    assert found == "triton, which writes keys and values, is not installed: pip install triton."


def test_graph_support_is_that_of_what_runs_batches_of_several_tokens() -> None:
    assert FlashAttnKernels(prefill=FA2, decode=FA2).cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    assert FlashAttnKernels(prefill=FA4, decode=FA2).cudagraph_support is AttentionCGSupport.ALWAYS
    assert FlashAttnKernels(prefill=FA3, decode=FA3).cudagraph_support is AttentionCGSupport.ALWAYS
