"""How often each pass matches and misses in each family: what is committed, and how it is made anew.

python -m tests.passes.golden_matches
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from piecegraph.compiler.api import compile as compile_module
from piecegraph.config import CompileConfig
from piecegraph.passes.pipeline import all_passes
from piecegraph.runner.attention.transformers_attention import name_layers, register_attention
from piecegraph.runner.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.rope import fix_longrope
from tests.runner.tiny_models import FAMILIES, MAX_LEN, UNLISTED

TABLE = Path(__file__).with_name("golden_matches.json")
COMMAND = "python -m tests.passes.golden_matches"
DTYPE = torch.bfloat16
"""What models are served in: its graphs have the casts that float32 ones lack."""

CPU = torch.device("cpu")

Matches = dict[str, dict[str, int]]  # pass -> {"matches": n, "misses": n}


def found_matches(family: str) -> Matches:
    """What every pass of ours finds in a traced family. Raises `PassFailed` if one fails."""
    register_attention()
    config = {**FAMILIES, **UNLISTED}[family]()
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPE, attn_implementation="piecegraph").eval()
    name_layers(model)
    fix_longrope(model, MAX_LEN)
    options = CompileConfig(compiler="eager", passes=tuple(each.name for each in all_passes()), strict=True)
    with (
        torch.no_grad(),
        compile_module(
            CausalLMForward(model), options, dynamic_dims=DYNAMIC_DIMS, example_inputs=example_inputs(CPU)
        ) as compiled,
    ):
        rows = compiled.report().passes
    return {row.name: {"matches": row.matches, "misses": len(row.misses)} for row in rows}


def committed_matches() -> dict[str, Matches]:
    table: dict[str, Matches] = json.loads(TABLE.read_text())
    return table


def difference(committed: Mapping[str, Mapping[str, int]], found: Mapping[str, Mapping[str, int]]) -> list[str]:
    """A line for each pass that is not what was committed."""
    return [
        f"{name}: committed {committed.get(name)}, found {found.get(name)}"
        for name in dict.fromkeys((*committed, *found))
        if committed.get(name) != found.get(name)
    ]


def main() -> None:
    table = {family: found_matches(family) for family in (*FAMILIES, *UNLISTED)}
    families = [
        f"  {json.dumps(family)}: {{\n"
        + ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        + "\n  }"
        for family, rows in table.items()
    ]
    TABLE.write_text("{\n" + ",\n".join(families) + "\n}\n")


if __name__ == "__main__":
    main()
