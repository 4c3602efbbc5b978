"""The values of the argument `quantization`, known without torch so that any other is refused when it arrives."""

from __future__ import annotations

from collections.abc import Mapping

from piecegraph.errors import ConfigError, did_you_mean

SCHEMES: Mapping[str, str] = {
    "int8": "weights of 8 bits with a scale for each output channel, made from a plain checkpoint while it loads",
}
"""The schemes of quantised weights, each with what it does."""

UNAVAILABLE_SCHEMES = (
    *("awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "deepspeedfp", "experts_int8", "fbgemm_fp8", "fp8"),
    *("fp_quant", "gguf", "gptq", "gptq_marlin", "hqq", "int4", "modelopt", "moe_wna16", "mxfp4", "ptpc_fp8", "quark"),
    *("torchao", "tpu_int8"),
)
"""Schemes that other runners have and this one lacks."""


def check_quantization(scheme: object) -> None:
    """Raise `ConfigError` unless `scheme` is None or a name in `SCHEMES`."""
    if scheme is None or (isinstance(scheme, str) and scheme in SCHEMES):
        return
    there = f"The schemes that are: {', '.join(map(repr, SCHEMES))}; None leaves weights as they are."
    if scheme in UNAVAILABLE_SCHEMES:
        raise ConfigError(f"quantization={scheme!r} is not yet available. {there}")
    raise ConfigError(f"quantization={scheme!r} is unknown.{did_you_mean(str(scheme), SCHEMES)}")
