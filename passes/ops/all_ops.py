"""Importing this defines every op that passes put into graphs: processes that compile pieces do."""

from __future__ import annotations

MODULES: tuple[str, ...] = (
    "piecegraph.passes.ops.act_mul",
    "piecegraph.passes.ops.linear",
    "piecegraph.passes.ops.moe_experts",
    "piecegraph.passes.ops.norm_linear",
    "piecegraph.passes.ops.rms_norm",
    "piecegraph.passes.ops.rotary_tables",
    "piecegraph.passes.ops.take_rows",
)
"""A line for each file of `passes/ops/` that defines an op."""


def define_all_ops() -> None:
    """Harmless to repeat."""
    import importlib

    for module in MODULES:
        importlib.import_module(module)
