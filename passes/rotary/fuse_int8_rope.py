"""`fuse-int8-rope`: what `fuse-rope-kv-write` does, for queries that linears over int8 weights project, on a CPU.

Between two calls of attention, nothing is left then but calls of our C++ kernels, which a replay makes without Python.
Beside other linears Inductor's own code rotates faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from piecegraph.passes.matching.rotary_pattern import RotatedHeads
from piecegraph.passes.matching.torch_ir import SILU, is_call
from piecegraph.passes.ops.quantised.int8_linear import INT8_LINEAR
from piecegraph.passes.rotary.fuse_rope_kv_write import FuseRopeKVWrite, projection_of


@dataclass(frozen=True)
class FuseInt8Rope(FuseRopeKVWrite):
    """A pass that fuses rotary embedding into attention where an `int8_linear` projects the query.

    A graph without silu has no sites: `fuse-int8-layers` takes none of its layers, so that Inductor generates code
    between its calls of attention anyway.
    """

    name: ClassVar[str] = "fuse-int8-rope"

    def is_for(self, graph: fx.Graph) -> bool:
        return any(node.target is INT8_LINEAR for node in graph.nodes) and any(
            is_call(node, SILU) for node in graph.nodes
        )

    def takes(self, query: RotatedHeads) -> bool:
        return projection_of(query).target is INT8_LINEAR
