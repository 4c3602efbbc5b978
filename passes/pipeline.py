"""The passes and the order they run in."""

from __future__ import annotations

from collections.abc import Sequence

from piecegraph.cpu_instructions import cpu_instructions, is_intel
from piecegraph.passes.cpu.use_onednn import UseOneDNN
from piecegraph.passes.eliminate_noops import EliminateNoops
from piecegraph.passes.fuse_act_mul import FuseActMul
from piecegraph.passes.fuse_add_rms_norm import FuseAddRMSNorm
from piecegraph.passes.fuse_all_reduce import FuseAllReduce
from piecegraph.passes.fuse_int8_layers import FuseInt8Layers
from piecegraph.passes.fuse_linear import FuseLinear
from piecegraph.passes.fuse_lookups import FuseLookups
from piecegraph.passes.kernels.cpu import int8_rows
from piecegraph.passes.matching.graph_pass import GraphPass
from piecegraph.passes.merge_projections import MergeProjections
from piecegraph.passes.moe.fuse_moe import FuseMoe
from piecegraph.passes.moe.fuse_routing import FuseRouting
from piecegraph.passes.quantised.fuse_act_quant import FuseActQuant
from piecegraph.passes.quantised.fuse_norm_quant import FuseNormQuant
from piecegraph.passes.rotary.fuse_int8_rope import FuseInt8Rope
from piecegraph.passes.rotary.fuse_rope_kv_write import FuseRopeKVWrite
from piecegraph.passes.select_rows_early import SelectRowsEarly


def all_passes() -> tuple[GraphPass, ...]:
    """Return every built-in pass, in the order they run. Their names are `config.PASSES`."""
    return (
        EliminateNoops(),
        MergeProjections(),
        FuseAddRMSNorm(),
        FuseActMul(),
        FuseRopeKVWrite(),
        FuseInt8Rope(),
        SelectRowsEarly(),
        FuseLinear(),
        FuseMoe(),
        FuseRouting(),
        FuseNormQuant(),
        FuseActQuant(),
        FuseAllReduce(),
        FuseLookups(),
        UseOneDNN(),
        FuseInt8Layers(),
    )


def default_passes(device_type: str, num_ranks: int = 1) -> tuple[GraphPass, ...]:
    """Return the passes that run by default on a device type (`"cpu"`, `"cuda"`).

    `num_ranks`: how many ranks divide each layer (`tensor_parallel_size`).
    """
    of_others = ON_A_CPU if device_type == "cuda" else ON_A_GPU | _not_on_this_cpu()
    left_out = of_others | (frozenset() if num_ranks > 1 else OF_RANKS)
    return tuple(each for each in all_passes() if each.name not in left_out)


ON_A_GPU = frozenset(
    {"fuse-add-rms-norm", "fuse-act-mul", "fuse-rope-kv-write", "fuse-linear", "fuse-moe", "fuse-routing"}
    | {"fuse-all-reduce", "fuse-norm-quant", "fuse-act-quant", "fuse-lookups"}
)
"""The passes that insert calls of Triton kernels. On a CPU the reference of such an op in plain torch would run, and
Inductor's own code is faster: these passes run there only if they are named."""

ON_A_CPU = frozenset({"use-onednn", "fuse-int8-rope", "fuse-int8-layers"})
"""The passes for what a CPU computes otherwise than a GPU."""

NOT_ON_INTEL = frozenset({"use-onednn"})
"""The passes that make up for MKL, whose kernels are slow on processors that are not Intel's, and fast on Intel's."""

WITH_OUR_KERNEL = frozenset({"fuse-int8-rope", "fuse-int8-layers"})
"""The passes that insert calls of C++ kernels. Step by step such an op is slower than Inductor's own code."""

OF_RANKS = frozenset({"fuse-all-reduce"})
"""The passes over collectives, which run only if several ranks divide each layer, or if they are named."""


def _not_on_this_cpu() -> frozenset[str]:
    """Return the passes that do not pay by default on this processor."""
    has_kernel = cpu_instructions().issuperset(int8_rows.KERNEL.instructions)
    return (NOT_ON_INTEL if is_intel() else frozenset()) | (frozenset() if has_kernel else WITH_OUR_KERNEL)


def pipeline(passes: Sequence[str | GraphPass] | None, device_type: str) -> tuple[GraphPass, ...]:
    """Return the passes of `CompileConfig.passes` for a device type.

    Built-in passes are given by name and run in their own order; the user's passes follow in the order given. None
    means the default passes of one rank.
    """
    if passes is None:
        return default_passes(device_type)
    named = [each for each in all_passes() if each.name in passes]
    return (*named, *(each for each in passes if isinstance(each, GraphPass)))
