"""The scales of cached keys and values that a checkpoint has, under the names that other tools give them.

compressed-tensors and vLLM name them by the attention module (`self_attn.k_scale`), exporters of float8 by its
projections (`self_attn.k_proj.k_scale`, or `output_scale` as the oldest), and the first ones had one for both
(`self_attn.kv_scale`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from piecegraph.errors import CheckpointError, UnsupportedModel

_OF_KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale")
_OF_VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "qkv_proj.v_scale", "v_proj.output_scale")
_OF_BOTH = ("kv_scale", "attn.kv_scale")
"""The ends of a tensor's name behind the path of an attention module."""

_ENDS = tuple(f".{end}" for end in (*_OF_KEYS, *_OF_VALUES, *_OF_BOTH))

_READABLE: Mapping[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor", "attn_head", None),
    "symmetric": (True, None),
    "dynamic": (False, None),
}
"""The fields of a `kv_cache_scheme` that say how numbers are kept, with the values that are read."""


class StoredScales(NamedTuple):
    """The scales of one layer, each `[1]`, for all heads, or `[num_kv_heads]` float32, on the CPU."""

    key: torch.Tensor
    value: torch.Tensor


def is_cache_scale(name: str) -> bool:
    """Return whether a tensor of that name is a scale of cached keys or values, and no weight of a model."""
    return name.endswith(_ENDS)


def has_cache_scales(files: Sequence[Path]) -> bool:
    """Return whether there are scales in safetensors files, of which only the headers are read."""
    from safetensors import SafetensorError, safe_open

    try:
        for file in _readable(files):
            with safe_open(str(file), framework="pt") as opened:
                if any(map(is_cache_scale, opened.keys())):
                    return True
    except (OSError, SafetensorError):
        return False  # whoever reads the weights says what is wrong
    return False


def check_cache_scheme(scheme: Mapping[str, Any] | None) -> None:
    """Raise `UnsupportedModel` for a `kv_cache_scheme` of compressed-tensors that is not e4m3 with fixed scales."""
    for name, wanted in _READABLE.items() if scheme else ():
        assert scheme is not None
        found = scheme.get(name)
        if found not in wanted:
            raise UnsupportedModel(
                f"the checkpoint's kv_cache_scheme has {name}={found!r}; caches of 8 bits in float (e4m3), symmetric, "
                "with fixed scales by tensor or by head (strategy 'tensor' or 'attn_head') are read here. Use such a "
                "checkpoint, or remove kv_cache_scheme from its quantization_config."
            )


def stored_scales(
    files: Sequence[Path], layers: Mapping[str, int], *, has_others: bool = False, of_drafts: Sequence[str] = ()
) -> dict[str, StoredScales]:
    """Return the scales in safetensors files by the layer's name, those of all `layers` or none.

    `layers`: the number of KV heads by the name of an attention module. `has_others`: other stages of a pipeline have
    more layers, whose scales are left to them. `of_drafts`: parts of the names of layers for multi-token prediction,
    whose scales are left out as their weights are. Raises `CheckpointError`, which names the tensor, for scales that
    are missing, double, of another shape, or not above 0, and for those of modules that are no layer.
    """
    from safetensors import safe_open

    found: dict[tuple[str, str], tuple[str, torch.Tensor]] = {}
    of_others = ""
    for file in _readable(files):
        with safe_open(str(file), framework="pt") as opened:
            for name in filter(is_cache_scale, opened.keys()):
                if any(layer in name for layer in of_drafts):
                    continue
                owner = _owner(name, layers)
                if owner is None and has_others:
                    of_others = name
                    continue
                if owner is None:
                    raise CheckpointError(
                        f"{name} in the checkpoint is a scale of cached keys or values, and the model has no attention "
                        f"layer there; its layers are named like {next(iter(layers), 'nothing')}. Check that the files "
                        "belong together."
                    )
                layer, parts = owner
                scale = _checked(name, opened.get_tensor(name), layers[layer])
                for part in parts:
                    if (layer, part) in found:
                        raise CheckpointError(
                            f"the checkpoint has two scales of the cached {part}s of {layer}: "
                            f"{found[layer, part][0]} and {name}. Remove one of them."
                        )
                    found[layer, part] = name, scale
    if not found and not of_others:
        return {}
    one = next((name for name, _ in found.values()), of_others)
    for layer in layers:
        for part in ("key", "value"):
            if (layer, part) not in found:
                raise CheckpointError(
                    f"the checkpoint has scales of cached keys and values ({one}), and none "
                    f"of the {part}s of {layer} ({layer}.{part[0]}_scale). Copy or download the files again, or give "
                    "calculate_kv_scales=True."
                )
    return {layer: StoredScales(found[layer, "key"][1], found[layer, "value"][1]) for layer in layers}


def _readable(files: Sequence[Path]) -> list[Path]:
    return [file for file in files if file.suffix == ".safetensors"]


def _owner(name: str, layers: Mapping[str, int]) -> tuple[str, tuple[str, ...]] | None:
    """Return the layer that a scale is of, and of what: "key", "value" or both; None if it is of no layer."""
    for ends, parts in ((_OF_KEYS, ("key",)), (_OF_VALUES, ("value",)), (_OF_BOTH, ("key", "value"))):
        for end in ends:
            if (layer := name.removesuffix(f".{end}")) != name and layer in layers:
                return layer, parts
    return None


def _checked(name: str, scale: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return a scale as `[1]` or `[num_kv_heads]` float32. Raises `CheckpointError`."""
    if not scale.is_floating_point() or scale.numel() not in (1, num_kv_heads):
        raise CheckpointError(
            f"{name} in the checkpoint is {scale.dtype} {list(scale.shape)}; a scale of cached keys or values is one "
            f"float, or one for each of the layer's {num_kv_heads} KV heads. Check that the files belong together."
        )
    wide = scale.flatten().float()
    if not bool((wide.isfinite() & (wide > 0)).all()):
        raise CheckpointError(
            f"{name} in the checkpoint has values that are not finite numbers above 0 ({wide.tolist()[:4]}); cached "
            "keys and values are divided by it. Copy or download the files again, or give calculate_kv_scales=True."
        )
    return wide
