"""The dtype that a model's weights are loaded as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from piecegraph.cpu_instructions import cpu_instructions, has_bfloat16
from piecegraph.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


def resolve_dtype(
    dtype: str | torch.dtype,
    config: PreTrainedConfig,
    device: torch.device,
    quantization: str | None = None,
    *,
    instructions: frozenset[str] | None = None,
) -> torch.dtype:
    """Return the dtype that weights are loaded as, and that activations have.

    `"auto"` is bfloat16 with quantised weights. Otherwise it is, on the CPU, bfloat16 if the checkpoint has 16 bits and
    the processor has instructions for bfloat16, else float32; `instructions` are those of this machine unless given. On
    a GPU it is the checkpoint's dtype if that has 16 bits, else bfloat16. Raises `ConfigError` for an unknown name, and
    for quantised weights with float16.
    """
    written = getattr(config, "quantization_config", None)
    if quantization == "gguf" and (not isinstance(written, Mapping) or written.get("quant_method") != "gguf"):
        raise ConfigError(
            "quantization='gguf' keeps the blocks of a .gguf file, and the model is none; leave it out, or use 'int8' "
            "or 'int4'."
        )
    if written is not None:
        if quantization not in (None, "gguf"):
            raise ConfigError(
                f"quantization={quantization!r} is made from a plain checkpoint, and this one is quantised already; "
                "leave it out."
            )
        quantization = "a quantised checkpoint"
    listed = cpu_instructions() if instructions is None else instructions
    resolved = _resolve_dtype(dtype, config, device, quantization, computes_bfloat16=has_bfloat16(listed))
    if quantization is not None and resolved is torch.float16:
        raise ConfigError(
            f"dtype=float16 is not available with quantization={quantization!r}, whose scales have the range of "
            "bfloat16; use bfloat16 or float32."
        )
    return resolved


def _resolve_dtype(
    dtype: str | torch.dtype,
    config: PreTrainedConfig,
    device: torch.device,
    quantization: str | None,
    *,
    computes_bfloat16: bool,
) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES.values():
            raise ConfigError(f"dtype={dtype} cannot run here; use float32, bfloat16 or float16.")
        return dtype
    if dtype == "auto":
        stored = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype
        of_16_bits = stored if stored in (torch.bfloat16, torch.float16) else None
        if device.type == "cpu":
            is_bfloat16 = quantization is not None or (of_16_bits is not None and computes_bfloat16)
            return torch.bfloat16 if is_bfloat16 else torch.float32
        return torch.bfloat16 if of_16_bits is None or quantization is not None else of_16_bits
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown.{did_you_mean(str(dtype), ['auto', *DTYPES])}")
    return DTYPES[dtype]
