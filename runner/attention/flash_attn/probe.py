"""A trial of each flash-attn kernel on the GPU before it is chosen: a build may lack what its version has.

A trial compiles what flash-attn 4 needs for a kind of layer, so that no step waits for it; batches of more than
256 requests take one more of its kernels, compiled when the first is captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from piecegraph.runner.attention.flash_attn.choice import FlashAttnKernels
from piecegraph.runner.attention.flash_attn.kernels import (
    DecodeBatch,
    FlashKernel,
    RaggedBatch,
    load_kernel,
)
from piecegraph.runner.attention.flash_attn.packages import Family
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.triton.reference import paged_attention

NUM_NEW = 3
NUM_CACHED = 4
TOLERANCE = 0.03
"""The largest relative root mean square error of a correct kernel; rounding to bfloat16 takes a tenth of it."""


def refusals(
    kernels: FlashAttnKernels, layers: Sequence[AttentionLayer], block_size: int, device: torch.device
) -> dict[Family, str]:
    """Return the chosen kernels that fail on this device, each with the reason."""
    kinds = dict.fromkeys(replace(layer, name="a layer like it") for layer in layers)
    found: dict[Family, str] = {}
    for family, phase in ((kernels.prefill, "prefill"), (kernels.decode, "decode")):
        for kind in kinds if family is not Family.TRITON and family not in found else ():
            reason = _tried(family, phase, kind, block_size, device)
            if reason is not None:
                found[family] = reason
                break
    return found


@lru_cache(maxsize=256)
def _tried(family: Family, phase: str, layer: AttentionLayer, block_size: int, device: torch.device) -> str | None:
    try:
        return failure(load_kernel(family), phase, layer, block_size, device)
    except Exception as error:  # whatever a package makes of an import or a call it cannot serve
        line = (str(error).strip() or "no message").splitlines()[0]
        return f"its {phase} failed here: {type(error).__name__}: {line[:200]}"


@torch.no_grad()
def failure(
    kernel: FlashKernel, phase: str, layer: AttentionLayer, block_size: int, device: torch.device
) -> str | None:
    """Return what is wrong with a kernel's result for one request, or None. Unwritten cache entries are NaN."""
    random = torch.Generator(device=device).manual_seed(0)
    num_new = 1 if phase == "decode" else NUM_NEW
    seq_len = NUM_CACHED + num_new

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device).to(layer.dtype)

    num_blocks = -(-seq_len // block_size)
    cache = KVCache(
        normal(num_blocks * block_size, layer.num_kv_heads, layer.key_dim),
        normal(num_blocks * block_size, layer.num_kv_heads, layer.value_dim),
    )
    cache.key[seq_len:] = cache.value[seq_len:] = float("nan")
    call = AttentionCall(
        query=normal(num_new, layer.num_q_heads, layer.key_dim),
        key=cache.key[NUM_CACHED:seq_len],
        value=cache.value[NUM_CACHED:seq_len],
        out=torch.full((num_new, layer.num_q_heads, layer.value_dim), float("nan"), dtype=layer.dtype, device=device),
        scale=layer.scale,
        window=layer.window,
        softcap=layer.softcap,
        sinks=normal(layer.num_q_heads) if layer.has_sinks else None,
    )
    kv_cache = KVCache(*(x.unflatten(0, (num_blocks, block_size)) for x in (cache.key, cache.value)))
    query_start_loc = torch.tensor([0, num_new], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([seq_len], dtype=torch.int32, device=device)
    block_table = torch.arange(num_blocks, dtype=torch.int32, device=device).unsqueeze(0)
    if phase == "decode":
        kernel.decode(call, kv_cache, DecodeBatch(seq_lens, block_table))
    else:
        kernel.prefill(call, kv_cache, RaggedBatch(0, num_new, query_start_loc, seq_lens, block_table))
    expected = torch.empty_like(call.out, dtype=torch.float32)
    paged_attention(
        call._replace(out=expected),
        kv_cache,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
    )
    error = float((call.out.float() - expected).norm() / expected.norm())
    return None if error < TOLERANCE else f"its {phase} is wrong here: relative error {error:.2g}"
