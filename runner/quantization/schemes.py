"""The values of the argument `quantization`, known without torch so that any other is refused when it arrives."""

from __future__ import annotations

from collections.abc import Mapping

from piecegraph.errors import ConfigError, did_you_mean

SCHEMES: Mapping[str, str] = {
    "int8": "weights of 8 bits with a scale for each output channel, made from a plain checkpoint while it loads",
    "int4": "weights of 4 bits with a scale and an offset for each 32 of a channel, and embeddings of 8 bits",
    "gguf": "the blocks of a .gguf file, or of the embedded model, as they are stored",
    "fp8": "weights in e4m3 with a scale for each output channel; embeddings stay as they are",
}
"""The schemes of quantised weights, each with what it does."""

UNAVAILABLE_SCHEMES: Mapping[str, str] = {
    **dict.fromkeys(
        ("awq", "awq_marlin", "compressed-tensors", "fp_quant", "gptq", "gptq_marlin", "moe_wna16", "mxfp4"),
        "is how a checkpoint is stored, which its own config says; leave quantization out",
    ),
    **dict.fromkeys(
        ("bitsandbytes", "hqq", "torchao", "quark", "modelopt", "experts_int8", "fbgemm_fp8", "ptpc_fp8"),
        "is not available here; use quantization='int8' or 'int4' with a plain checkpoint",
    ),
    **dict.fromkeys(("deepspeedfp", "tpu_int8"), "is not available here; use quantization='int8' or 'fp8'"),
}
"""Schemes that other runners have and this one does not take, each with what to do."""


def check_quantization(scheme: object) -> None:
    """Raise `ConfigError` unless `scheme` is None or a name in `SCHEMES`."""
    if scheme is None or (isinstance(scheme, str) and scheme in SCHEMES):
        return
    if isinstance(scheme, str) and scheme in UNAVAILABLE_SCHEMES:
        there = f"The schemes that are: {', '.join(map(repr, SCHEMES))}; None leaves weights as they are."
        raise ConfigError(f"quantization={scheme!r} {UNAVAILABLE_SCHEMES[scheme]}. {there}")
    raise ConfigError(f"quantization={scheme!r} is unknown.{did_you_mean(str(scheme), SCHEMES)}")
