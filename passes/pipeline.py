"""Which passes run, and in which order: all of it on one screen."""

from __future__ import annotations

from collections.abc import Sequence

from piecegraph.passes.eliminate_noops import EliminateNoops
from piecegraph.passes.fuse_act_mul import FuseActMul
from piecegraph.passes.fuse_add_rms_norm import FuseAddRMSNorm
from piecegraph.passes.fuse_linear import FuseLinear
from piecegraph.passes.fuse_lookups import FuseLookups
from piecegraph.passes.fuse_moe import FuseMoe
from piecegraph.passes.fuse_rope_kv_write import FuseRopeKVWrite
from piecegraph.passes.graph_pass import GraphPass
from piecegraph.passes.merge_projections import MergeProjections
from piecegraph.passes.tail import Tail


def all_passes() -> tuple[GraphPass, ...]:
    """Every pass of ours, in the order they run. Their names are `config.PASSES`."""
    return (
        EliminateNoops(),
        MergeProjections(),
        FuseAddRMSNorm(),
        FuseActMul(),
        FuseRopeKVWrite(),
        Tail(),
        FuseLinear(),
        FuseMoe(),
        FuseLookups(),
    )


def default_passes(device_type: str) -> tuple[GraphPass, ...]:
    """The passes that pay on a device (`"cpu"`, `"cuda"`), where the user names none."""
    return tuple(each for each in all_passes() if device_type == "cuda" or each.name not in ON_A_GPU)


ON_A_GPU = frozenset(
    {"fuse-add-rms-norm", "fuse-act-mul", "fuse-rope-kv-write", "fuse-linear", "fuse-moe", "fuse-lookups"}
)
"""Passes that make calls of Triton kernels. Their references in plain torch run on a CPU, where Inductor's own
code is faster: there they run if they are named."""


def pipeline(passes: Sequence[str | GraphPass] | None, device_type: str) -> tuple[GraphPass, ...]:
    """What `CompileConfig.passes` means on a device: names of ours in any order, then the user's own as given."""
    if passes is None:
        return default_passes(device_type)
    named = [each for each in all_passes() if each.name in passes]
    return (*named, *(each for each in passes if isinstance(each, GraphPass)))
