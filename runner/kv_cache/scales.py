"""The scales of cached keys and values: read from the checkpoint, or calibrated, with the note that says which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from piecegraph.errors import ConfigError, UnsupportedModel
from piecegraph.runner.attention.interface.kv_cache import KVCache, KVScales
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.kv_cache.calibration import NUM_TOKENS, calibrated_scales
from piecegraph.runner.quantization.checkpoints.cache_scales import has_cache_scales, stored_scales

Scales = Mapping[str, KVScales]
"""By a layer's name the scales of its keys and of its values, float32, one or one for each KV head."""


def check_calibration(config: EngineConfig, *, has_states: bool) -> None:
    """Raise `UnsupportedModel` if scales are to be calibrated for a model that has layers with states."""
    if config.calculate_kv_scales and has_states:
        raise UnsupportedModel(
            "calculate_kv_scales=True runs the model over one text without a cache, and it has layers with states; "
            "leave calculate_kv_scales out."
        )


def scales_note(config: EngineConfig) -> tuple[str, ...]:
    """Return the notes that say which scales cached keys and values have, by the names in the model's files."""
    if config.calculate_kv_scales:
        notes = [
            "kv_cache_dtype: keys and values of each head are kept in e4m3 with scales of their own, calibrated at "
            f"the start over {NUM_TOKENS} fixed tokens, or as many as max_model_len allows"
        ]
        if config.enable_lora:
            notes.append(
                "kv_cache_dtype: scales are calibrated without adapters; one that makes keys or values more than twice "
                "as large loses the largest of them"
            )
        if config.speculative is not None and config.speculative.method != "ngram":
            notes.append("kv_cache_dtype: keys and values of what drafts are kept with scales of 1")
        return tuple(notes)
    is_stored = has_cache_scales(config.source.weight_files)
    if config.keeps_fp8:
        of = "with the checkpoint's scales" if is_stored else "without scales, because the checkpoint has none"
        return (f"kv_cache_dtype: keys and values are kept in e4m3 {of}",)
    if is_stored:
        return (
            "kv_cache_dtype: the checkpoint has scales of keys and values in e4m3, which are not used: they stay in "
            "the model's dtype; kv_cache_dtype='fp8' takes half the memory",
        )
    return ()


def shift_note(config: EngineConfig, layers: Sequence[AttentionLayer]) -> tuple[str, ...]:
    """Return the note that says from which layers' cached keys a constant is subtracted, and why from no others."""
    if not config.calculate_kv_scales:
        return ()
    kept = [f"{layer.name} {layer.unshiftable_reason}" for layer in layers if layer.unshiftable_reason is not None]
    if not kept:
        return ("kv_cache_dtype: keys are kept less a constant of their head, which changes no attention weight",)
    number = f"{len(kept)} of {len(layers)} layers" if len(kept) < len(layers) else "all layers"
    return (f"kv_cache_dtype: keys of {number} are kept as they are, not less a constant of their head: {kept[0]}",)


def cache_scales(
    config: EngineConfig,
    layers: Sequence[AttentionLayer],
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object],
    *,
    vocab_size: int,
    max_model_len: int,
    device: torch.device,
    of_drafts: Sequence[str] = (),
) -> Scales:
    """Return the scales of an engine's caches; none if they keep other numbers, or keep them as they are.

    `forward`: the model, for a calibration, which `check_calibration` allows. `of_drafts`: as for `stored_scales`.
    Raises `CheckpointError` for bad scales, and `ConfigError` for scales by head that would have to be divided among
    ranks.
    """
    if not config.keeps_fp8:
        return {}
    if config.calculate_kv_scales:
        sizes = {"vocab_size": vocab_size, "max_model_len": max_model_len}
        return calibrated_scales(forward, layers, **sizes, device=device)
    heads = {layer.name: layer.num_kv_heads * config.tensor_parallel_size for layer in layers}
    has_others = config.pipeline_parallel_size > 1
    found = stored_scales(config.source.weight_files, heads, has_others=has_others, of_drafts=of_drafts)
    if config.tensor_parallel_size > 1 and any(each.numel() > 1 for pair in found.values() for each in pair):
        raise ConfigError(
            "the checkpoint has scales of cached keys and values for each head, which are not divided among ranks yet; "
            f"leave tensor_parallel_size={config.tensor_parallel_size} or kv_cache_dtype out."
        )
    return {name: KVScales(*pair) for name, pair in found.items()}


def write_scales(scales: Scales, caches: Mapping[str, KVCache]) -> None:
    """Write scales into those of the caches, in place, so that graphs over them hold the new ones."""
    for name, found in scales.items():
        of_layer = caches[name].scales
        assert of_layer is not None, f"{name} keeps keys and values as they are"
        of_layer.copy_(found)
