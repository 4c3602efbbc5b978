"""The list of modules that define the ops that passes insert. Processes that compile pieces import them."""

from __future__ import annotations

MODULES: tuple[str, ...] = (
    "piecegraph.passes.ops.act_mul",
    "piecegraph.passes.ops.collectives",
    "piecegraph.passes.ops.cpu.int8_layer_linears",
    "piecegraph.passes.ops.cpu.onednn_linear",
    "piecegraph.passes.ops.linear",
    "piecegraph.passes.ops.lora",
    "piecegraph.passes.ops.moe.experts",
    "piecegraph.passes.ops.moe.routing",
    "piecegraph.passes.ops.norm_linear",
    "piecegraph.passes.ops.quantised.experts",
    "piecegraph.passes.ops.quantised.fp8_linear",
    "piecegraph.passes.ops.quantised.grouped_linear",
    "piecegraph.passes.ops.quantised.int4_tiles_linear",
    "piecegraph.passes.ops.quantised.int8_inputs_linear",
    "piecegraph.passes.ops.quantised.int8_linear",
    "piecegraph.passes.ops.quantised.rounded_act_mul",
    "piecegraph.passes.ops.quantised.rounded_linear",
    "piecegraph.passes.ops.quantised.rounded_norms",
    "piecegraph.passes.ops.rms_norm",
    "piecegraph.passes.ops.rotary_tables",
    "piecegraph.passes.ops.take_rows",
)
"""The modules of `passes/ops/` that define an op."""


def define_all_ops() -> None:
    """Define every op that passes insert. Idempotent."""
    import importlib

    for module in MODULES:
        importlib.import_module(module)
