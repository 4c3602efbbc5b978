"""The list of formats of quantised checkpoints, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from piecegraph.errors import UnsupportedModel
from piecegraph.runner.quantization.checkpoints.cache_scales import check_cache_scheme
from piecegraph.runner.quantization.checkpoints.compressed_tensors import CompressedTensors
from piecegraph.runner.quantization.checkpoints.finegrained_fp8 import FineGrainedFp8
from piecegraph.runner.quantization.checkpoints.gguf_blocks import GgufBlocks
from piecegraph.runner.quantization.checkpoints.gptq import Awq, Gptq
from piecegraph.runner.quantization.checkpoints.mxfp4 import Mxfp4Experts
from piecegraph.runner.quantization.checkpoints.stored import StoredCheckpoint

_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], StoredCheckpoint]] = {
    kind.quant_method: kind.of for kind in (CompressedTensors, FineGrainedFp8, Gptq, Awq, GgufBlocks, Mxfp4Experts)
}
"""The readers of a `quantization_config`, by its `quant_method`."""


def stored_checkpoint(written: object) -> StoredCheckpoint | None:
    """Return the format of a checkpoint by the `quantization_config` of its config; None: its weights are floats.

    compressed-tensors writes such a config for scales of cached keys and values alone.

    Raises `UnsupportedModel`, which names what cannot be read and says what to do.
    """
    fields: Mapping[str, Any] = written if isinstance(written, Mapping) else written.to_dict()  # type: ignore[attr-defined]
    method = fields.get("quant_method")
    method = str(getattr(method, "value", method))
    if method == CompressedTensors.quant_method and not fields.get("config_groups") and fields.get("kv_cache_scheme"):
        check_cache_scheme(fields["kv_cache_scheme"])
        return None
    if method in _FORMATS:
        return _FORMATS[method](fields)
    raise UnsupportedModel(
        f"the weights are quantised with {method!r}, which cannot be read here; formats that can are "
        f"{', '.join(_FORMATS)}. Use such a checkpoint, or an unquantised one of the model, which "
        "quantization='int8' or 'int4' quantises while it loads."
    )
