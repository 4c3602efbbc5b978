"""Layers with latent attention: which are known, what is absorbed, and what a token takes at real sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig, KimiLinearConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from piecegraph.runner.attention.interface.kv_cache import allocate_kv_caches, bytes_per_block
from piecegraph.runner.attention.interface.latent import absorbed_query, expanded_values, keep_compressed, keep_latents
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.scheduling.kv_cache_group import CacheKind, KVCacheGroup
from tests.runner.tiny_models import make_config

HEADS, NOPE, ROPE, VALUE, RANK = 4, 8, 6, 12, 16


def latent_layer(*, num_heads: int = HEADS, rank: int = RANK, rope: int = ROPE) -> AttentionLayer:
    return AttentionLayer(
        name="layer", num_q_heads=num_heads, num_kv_heads=1, key_dim=rank + rope, value_dim=rank, dtype=torch.bfloat16,
        scale=1.0, window=0, softcap=0.0, has_sinks=False, is_latent=True,
    )  # fmt: skip


def attention() -> Any:
    sizes = {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "kv_lora_rank": RANK}
    config: Any = make_config("DeepseekV3Config", num_key_value_heads=4, q_lora_rank=8, **sizes)
    return DeepseekV3Attention(config, 0)


def test_attention_over_latents_is_attention_over_what_they_expand_to() -> None:
    torch.manual_seed(0)
    query = torch.randn(HEADS, 5, NOPE + ROPE, dtype=torch.float64)
    latent, rope = torch.randn(1, 1, 5, RANK).double(), torch.randn(1, 1, 5, ROPE).double()
    layer = attention().double()
    key, value = layer.expand_kv(latent, rope)
    expected = F.scaled_dot_product_attention(query[None], key, value, is_causal=True, scale=0.3)
    weight = layer.kv_b_proj.weight.view(HEADS, -1, RANK)
    absorbed = absorbed_query(query, weight, ROPE).transpose(0, 1)[None]
    keys = torch.cat([latent, rope], dim=-1).expand(-1, HEADS, -1, -1)
    out = F.scaled_dot_product_attention(absorbed, keys, keys[..., :RANK], is_causal=True, scale=0.3)
    found = expanded_values(out[0].transpose(0, 1), weight, NOPE)
    torch.testing.assert_close(found, expected[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("config", "at_most"),
    [(DeepseekV3Config, 1 / 70), (KimiLinearConfig, 1 / 10), (Glm4MoeLiteConfig, 1 / 17), (DeepseekV2Config, 1 / 10)],
)
def test_a_token_takes_a_tenth_at_real_sizes(config: Callable[[], Any], at_most: float) -> None:
    """By transformers' own defaults, against the keys and values of all heads."""
    sizes = config()
    heads, nope, rope = sizes.num_attention_heads, sizes.qk_nope_head_dim, sizes.qk_rope_head_dim
    layer = latent_layer(num_heads=heads, rank=sizes.kv_lora_rank, rope=rope)
    expanded = heads * (nope + rope + sizes.v_head_dim) * layer.dtype.itemsize
    assert bytes_per_block([layer], 1) == (sizes.kv_lora_rank + rope) * layer.dtype.itemsize <= at_most * expanded


def test_values_lie_in_the_memory_of_keys() -> None:
    layer = latent_layer()
    assert layer.cache_spec.kind is CacheKind.LATENT and layer.cache_spec.group() == KVCacheGroup(is_latent=True)
    cache = allocate_kv_caches([layer], 3, 4, torch.device("cpu"))["layer"]
    assert cache.key.shape == (3, 4, 1, RANK + ROPE) and cache.value.shape == (3, 4, 1, RANK)
    assert cache.key.untyped_storage().nbytes() == 3 * bytes_per_block([layer], 4) == 3 * 4 * (RANK + ROPE) * 2
    cache.key[1, 2, 0] = torch.arange(RANK + ROPE)
    assert cache.value[1, 2, 0].tolist() == list(range(RANK))


def test_a_known_layer_keeps_its_latents() -> None:
    layer = attention()
    problem, (note,) = keep_latents(nn.ModuleList([layer, nn.Linear(2, 2)]))
    assert problem is None and layer.expand_kv is keep_compressed
    assert note.startswith("latent attention: in each of 1 layers a token takes 22 numbers") and "104: 21.2%" in note
    assert keep_latents(nn.Linear(2, 2)) == (None, ())


def _with_bias(layer: Any) -> None:
    layer.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + VALUE))


def _with_an_indexer(layer: Any) -> None:
    layer.indexer = nn.Linear(2, 2)


def _without_norm(layer: Any) -> None:
    layer.kv_a_layernorm = None


def _with_more_numbers(layer: Any) -> None:
    layer.kv_a_proj_with_mqa = nn.Linear(32, RANK + ROPE + 1)


def _with_scaled_keys(layer: Any) -> None:
    class Scaled(DeepseekV3Attention):
        def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            key, value = super().expand_kv(kv_nope, k_rot)
            return key * 2, value

    layer.__class__ = Scaled


def _with_other_arguments(layer: Any) -> None:
    class Other(DeepseekV3Attention):
        def expand_kv(self, kv_nope: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return kv_nope

    layer.__class__ = Other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_bias, "kv_b_proj is Linear"),
        (_with_an_indexer, "it has indexer"),
        (_without_norm, "it has no kv_a_layernorm"),
        (_with_more_numbers, "gives 23 numbers, not 22"),
        (_with_scaled_keys, "its expand_kv computes something else"),
        (_with_other_arguments, "its expand_kv computes something else"),
    ],
)
def test_a_layer_that_differs_is_named_with_its_difference(change: Callable[[Any], None], message: str) -> None:
    layer = attention()
    change(layer)
    problem, notes = keep_latents(nn.ModuleDict({"self_attn": layer}))
    assert problem is not None and problem.startswith("self_attn (") and message in problem and not notes
    assert "expand_kv" not in vars(layer)


def test_a_class_without_the_method_keeps_all_heads_and_says_so() -> None:
    class Older(nn.Module):
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, num_heads = RANK, NOPE, ROPE, VALUE, HEADS

        def __init__(self) -> None:
            super().__init__()
            self.kv_a_proj_with_mqa = nn.Linear(32, RANK + ROPE)
            self.kv_a_layernorm = nn.Identity()
            self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)

    problem, (note,) = keep_latents(nn.ModuleList([Older()]))
    assert problem is None and "1 of the layers keep the keys and values of all heads" in note
