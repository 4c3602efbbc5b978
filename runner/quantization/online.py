"""The schemes of a plain checkpoint's modules when it is quantised while it loads."""

from __future__ import annotations

from collections.abc import Mapping

from piecegraph.runner.quantization.methods.linear_method import Scheme
from piecegraph.runner.quantization.quantise import SchemeOf

INT4_GROUP = 32
"""The columns that share a scale and an offset with `quantization="int4"`: those of GGUF's blocks."""


_INT8 = Scheme(method="int8")
SCHEMES: Mapping[str, tuple[Scheme, Scheme | None]] = {
    "int8": (_INT8, _INT8),
    "int4": (Scheme(method="int4", group_size=INT4_GROUP, has_offset=True, may_round=True), _INT8),
    "fp8": (Scheme(method="fp8"), None),
}
"""By value of `quantization`: the scheme of linears, and that of embeddings; None: they stay as they are."""


def online_schemes(quantization: str) -> SchemeOf:
    """Return the scheme of each module for a value of `quantization` other than "gguf"."""
    linears, embeddings = SCHEMES[quantization]

    def scheme_of(path: str, class_name: str) -> Scheme | None:
        return linears if class_name == "Linear" else embeddings

    return scheme_of
