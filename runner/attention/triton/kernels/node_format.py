"""The layout of a Triton kernel's arguments in the parameter buffer of a graph's kernel node."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from piecegraph.compiler.common.cuda_driver import (
    KernelNodeUpdate,
    KernelParameter,
    kernel_parameters,
    unavailable_reason,
)

CODES = {
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp32": "f",
    "fp64": "d",
}
"""The `struct` code of each scalar type of Triton; pointer types start with an asterisk."""

WARP_THREADS = 32


class NodeFormat:
    """One compiled kernel that a kernel node of any graph can be set to."""

    def __init__(self, layout: struct.Struct, places: Sequence[int], update: KernelNodeUpdate) -> None:
        self._layout = layout
        self._pick = itemgetter(*places)
        self._update = update

    def patch(self, graph_exec: int, node: int, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        """Set `node` to this kernel. `values`: its arguments in order, constants included, pointers as addresses."""
        self._layout.pack_into(self._update.parameters, 0, *self._pick(values))
        self._update.apply(graph_exec, node, grid)


def node_format(compiled: Any, names: Sequence[str]) -> NodeFormat | str:
    """Return the format of a kernel that Triton compiled and loaded, with parameters `names`; or why there is none."""
    reason = unavailable_reason()
    if reason is not None:
        return reason
    metadata = compiled.metadata
    if getattr(metadata, "num_ctas", 1) != 1 or getattr(metadata, "launch_cooperative_grid", False):
        return "the kernel is launched in clusters or as a cooperative grid"
    signature: Mapping[str, str] = compiled.src.signature
    layout = parameter_layout([signature[name] for name in names], kernel_parameters(compiled.function))
    if isinstance(layout, str):
        return layout
    places = [place for place, name in enumerate(names) if signature[name] != "constexpr"]
    update = KernelNodeUpdate(
        compiled.function,
        num_threads=metadata.num_warps * WARP_THREADS,
        shared_bytes=metadata.shared,
        parameter_bytes=layout.size,
    )
    return NodeFormat(layout, places, update)


def parameter_layout(types: Sequence[str], parameters: Sequence[KernelParameter]) -> struct.Struct | str:
    """Return the buffer layout of a kernel with arguments of these Triton types, or why the two do not match.

    `parameters`: the compiled kernel's, as the driver reports them; constants are not among them. Those after the
    arguments are scratch memory of Triton's, which our kernels do not use, and are null.
    """
    codes = ["Q" if kind.startswith("*") else CODES.get(kind, kind) for kind in types if kind != "constexpr"]
    text, end = "<", 0
    for code, parameter in zip(codes, parameters, strict=False):
        if code not in CODES.values() or struct.calcsize(f"<{code}") != parameter.size:
            return f"a parameter of {parameter.size} bytes is not a {code!r}"
        text += "x" * (parameter.offset - end) + code
        end = parameter.offset + parameter.size
    if len(codes) > len(parameters):
        return f"the kernel has {len(parameters)} parameters, and Triton passes {len(codes)}"
    last = parameters[-1]
    return struct.Struct(text + "x" * (last.offset + last.size - end))
