"""Time routed experts on a GPU at decode and prefill sizes, beside transformers' own `grouped_mm` form.

`python -m piecegraph.tools.bench.kernels.moe --help` lists the options. Calls are timed in one CUDA graph, over
several layers' weights that together exceed the GPU's L2; results are checked against torch before they are timed. The
bytes that must be read are those of the experts that some token chose.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
import torch.nn.functional as F

from piecegraph.passes.kernels.common.gpu_limits import limits_of
from piecegraph.passes.kernels.moe.config import MoeConfig, Tile, moe_config
from piecegraph.tools.bench.kernels.attention import (
    READ_FLOOR_BYTES_PER_S,
    compile_ahead,
    ints,
    microseconds,
    short,
)
from piecegraph.tools.bench.kernels.gpu import describe, gpu_of_benchmark

POOL_BYTES = 512 * 2**20
"""The least size of the experts that one replay reads, several times an L2."""

TOLERANCE = 1e-2
"""Relative root mean square error above which a result is called wrong; rounding in bfloat16 takes about half."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The experts of one layer."""

    num_experts: int
    top_k: int
    hidden: int
    size: int

    def expert_bytes(self, itemsize: int) -> int:
        return 3 * self.hidden * self.size * itemsize


LAYERS = {
    "qwen3-30b-a3b": Layer(num_experts=128, top_k=8, hidden=2048, size=768),
    "qwen3-next-80b-a3b": Layer(num_experts=512, top_k=10, hidden=2048, size=512),
    "mixtral-8x7b": Layer(num_experts=8, top_k=2, hidden=4096, size=14336),
}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A batch for each copy of the layer's weights; the batches choose experts at random, each its own."""

    x: torch.Tensor  # [num_tokens, hidden]
    topk_weights: list[torch.Tensor]  # [num_tokens, top_k] float32
    topk_ids: list[torch.Tensor]  # [num_tokens, top_k] int64
    gate_up: list[torch.Tensor]  # [num_experts, 2 * size, hidden]
    down: list[torch.Tensor]  # [num_experts, hidden, size]

    @property
    def num_experts_hit(self) -> float:
        """The number of experts that a batch chooses, on average."""
        return sum(len(set(ids.flatten().tolist())) for ids in self.topk_ids) / len(self.topk_ids)

    def operands(self, copy: int) -> tuple[torch.Tensor, ...]:
        weights = copy % len(self.gate_up)
        return self.x, self.topk_weights[copy], self.topk_ids[copy], self.gate_up[weights], self.down[weights]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. `us` is None if it failed; `note` says how, or what is special."""

    layer: str
    num_tokens: int
    kernel: str
    setting: str
    us: float | None
    bytes_to_read: float  # experts hit, on average, and every token once in and once out
    error: float | None = None  # relative root mean square, to torch in float32
    note: str = ""

    @property
    def floor_us(self) -> float:
        return self.bytes_to_read / READ_FLOOR_BYTES_PER_S * 1e6

    @property
    def share(self) -> float | None:
        return None if self.us is None else self.floor_us / self.us


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--layer", "layers", type=click.Choice(list(LAYERS)), multiple=True, default=tuple(LAYERS))
@click.option("--tokens", default="1,8,32,128,256,2048", help="Comma-separated numbers of tokens.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16")
@click.option("--sweep", is_flag=True, help="Also time a grid of other layouts, one product's tile at a time.")
@click.option("--jobs", default=8, help="Threads that compile a sweep's settings ahead.")
@click.option("--top", default=6, help="Settings of a sweep that are shown, best first.")
@click.option("--grouped-mm/--no-grouped-mm", default=True, help="Time transformers' form too.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all rows here.")
def main(
    layers: Sequence[str],
    tokens: str,
    dtype: str,
    sweep: bool,
    jobs: int,
    top: int,
    grouped_mm: bool,
    json_file: Path | None,
) -> None:
    """Time routed experts; the floor is the bytes that must be read, at 4.08 TB/s."""
    device = gpu_of_benchmark()
    click.echo(f"{describe(device)}, {dtype}")
    rows: list[Row] = []
    for name in layers:
        weights = _make_weights(LAYERS[name], getattr(torch, dtype), device)
        for num_tokens in ints(tokens):
            inputs = _make_inputs(LAYERS[name], num_tokens, weights)
            found = _time(name, inputs, sweep, grouped_mm, jobs)
            rows += found
            _show(found, top)
            if json_file is not None:
                json_file.write_text(json.dumps([as_data(row) for row in rows], indent=1))


def as_data(row: Row) -> dict[str, object]:
    return {**dataclasses.asdict(row), "floor_us": row.floor_us, "share": row.share}


def _make_weights(layer: Layer, dtype: torch.dtype, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return so many copies that those a replay reads exceed an L2 even if every call reads `top_k` experts."""
    random = torch.Generator(device=device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(std=size[-1] ** -0.5, generator=random)

    copies = max(2, -(-POOL_BYTES // (layer.num_experts * layer.expert_bytes(dtype.itemsize))))
    return [
        (normal(layer.num_experts, 2 * layer.size, layer.hidden), normal(layer.num_experts, layer.hidden, layer.size))
        for _ in range(copies)
    ]


def _make_inputs(layer: Layer, num_tokens: int, weights: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Inputs:
    """Return as many batches as it takes to read `POOL_BYTES`, at most 32; they use the copies of weights in turn."""
    gate_up = weights[0][0]
    random = torch.Generator(device=gate_up.device).manual_seed(num_tokens)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, device=gate_up.device)

    read = min(num_tokens * layer.top_k, layer.num_experts) * layer.expert_bytes(gate_up.element_size())
    batches = min(32, max(len(weights), -(-POOL_BYTES // read)))
    chosen = [normal(num_tokens, layer.num_experts).softmax(-1).topk(layer.top_k, -1) for _ in range(batches)]
    return Inputs(
        x=normal(num_tokens, layer.hidden).to(gate_up.dtype),
        topk_weights=[weight / weight.sum(-1, keepdim=True) for weight, _ in chosen],
        topk_ids=[ids for _, ids in chosen],
        gate_up=[each for each, _ in weights],
        down=[each for _, each in weights],
    )


def bytes_to_read(layer: Layer, num_tokens: int, num_experts_hit: float, itemsize: int) -> float:
    """Return the bytes of the weights of the chosen experts, and of the tokens in and out."""
    return num_experts_hit * layer.expert_bytes(itemsize) + 2 * num_tokens * layer.hidden * itemsize


def _time(name: str, inputs: Inputs, sweep: bool, grouped_mm: bool, jobs: int) -> list[Row]:
    from piecegraph.passes.kernels.moe.experts import moe_experts_on_gpu

    layer, num_tokens = LAYERS[name], inputs.x.shape[0]
    expected = _expected(inputs)
    must_read = bytes_to_read(layer, num_tokens, inputs.num_experts_hit, inputs.x.element_size())
    default = moe_config(
        num_tokens=num_tokens, top_k=layer.top_k, num_experts=layer.num_experts, hidden=layer.hidden, size=layer.size,
        shared_bytes=limits_of(inputs.x.device).shared_bytes,
    )  # fmt: skip

    def ours(config: MoeConfig) -> Callable[[int], torch.Tensor]:
        def call(copy: int) -> torch.Tensor:
            x, topk_weights, topk_ids, gate_up, down = inputs.operands(copy)
            return moe_experts_on_gpu(x, topk_weights, topk_ids, gate_up, down, "silu", config=config)

        return call

    kernels: list[tuple[str, str, Callable[[int], torch.Tensor]]] = [("piecegraph", "default", ours(default))]
    if grouped_mm:
        kernels.append(("grouped_mm", "", lambda copy: _grouped_mm_form(inputs, copy)))
    if sweep:
        kernels += [("piecegraph", setting(config), ours(config)) for config in other_configs(default)]
        compile_ahead([partial(_run, call, 0) for _, _, call in kernels], inputs.x.device, jobs)
    rows = []
    for kernel, text, call in kernels:
        us, error, note = None, None, ""
        try:
            error = float((call(0).float() - expected).norm() / expected.norm())
            note = "" if error < TOLERANCE else "WRONG"
            us = microseconds([partial(_run, call, copy) for copy in range(len(inputs.topk_ids))])
        except Exception as failure:  # a setting that does not fit the GPU, or a form that cannot be captured: go on
            note = short(failure)
        text = f"{text}: {setting(default)}" if text == "default" else text
        rows.append(
            Row(
                layer=name, num_tokens=num_tokens, kernel=kernel, setting=text, us=us, bytes_to_read=must_read,
                error=error, note=note,
            )
        )  # fmt: skip
    return rows


def _run(call: Callable[[int], object], copy: int) -> None:
    call(copy)


def setting(config: MoeConfig) -> str:
    tiles = " ".join(
        f"{name}={tile.block_n}x{tile.block_k}/{tile.num_warps}w/{tile.num_stages}s"
        for name, tile in (("gate_up", config.gate_up), ("down", config.down))
    )
    return f"m={config.block_m} {tiles}"


def other_configs(default: MoeConfig) -> list[MoeConfig]:
    """Return configs with other rows per block and other tiles, one product at a time.

    The other way of computing few tokens is included.
    """
    rows = (1,) if not default.is_sorted else (16, 32, 64, 128)
    columns, depths = (
        ((2, 4, 8, 16), (256, 512, 1024, 2048)) if not default.is_sorted else ((32, 64, 128), (32, 64, 128))
    )
    found = [dataclasses.replace(default, block_m=block_m) for block_m in rows]
    for block_n, block_k, warps, stages in itertools.product(columns, depths, (4, 8), (3, 4)):
        tile = Tile(block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages)
        found += [dataclasses.replace(default, gate_up=tile), dataclasses.replace(default, down=tile)]
    if not default.is_sorted:
        tile = Tile(block_n=32, block_k=128, num_warps=4, num_stages=4)
        found.append(MoeConfig(block_m=16, gate_up=tile, down=tile))
    elif default.block_m == 16:
        tile = Tile(block_n=8, block_k=512, num_warps=4, num_stages=4)
        found.append(MoeConfig(block_m=1, gate_up=tile, down=tile))
    return [config for config in found if config != default]


def _grouped_mm_form(inputs: Inputs, copy: int) -> torch.Tensor:
    """Return transformers' own function, bound to an object with the attributes that it reads of its module."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    x, topk_weights, topk_ids, gate_up, down = inputs.operands(copy)

    def apply_gate(gate_up_out: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_out.chunk(2, dim=-1)
        return F.silu(gate) * up

    experts: Any = SimpleNamespace(
        num_experts=gate_up.shape[0], gate_up_proj=gate_up, down_proj=down, has_gate=True, has_bias=False,
        is_transposed=False, _apply_gate=apply_gate, _is_expert_parallel=False,
        has_post_expert_norm=False,
    )  # fmt: skip
    result: torch.Tensor = grouped_mm_experts_forward(experts, x, topk_ids, topk_weights)
    return result


def _expected(inputs: Inputs) -> torch.Tensor:
    """Return torch's result for the first batch in float32, computed one expert at a time."""
    x, topk_weights, topk_ids, gate_up, down = inputs.operands(0)
    result = torch.zeros_like(x, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ gate_up[expert].float().t()).chunk(2, -1)
        output = (F.silu(gate) * up) @ down[expert].float().t()
        result.index_add_(0, token, output * topk_weights[token, choice, None])
    return result


def _show(rows: Sequence[Row], top: int) -> None:
    """Print the default and transformers' form first, then the best of a sweep."""
    first = rows[0]
    click.echo(
        f"\n{first.layer}, {first.num_tokens} tokens: {first.bytes_to_read / 1e6:.1f} MB to read, "
        f"floor {first.floor_us:.1f} us"
    )
    named = [row for row in rows if row.kernel != "piecegraph" or row.setting.startswith("default")]
    swept = sorted((row for row in rows if row not in named), key=lambda row: row.us or float("inf"))
    for row in (*named, *swept[:top]):
        us = "   failed" if row.us is None else f"{row.us:9.2f}"
        share = "" if row.share is None else f"{row.share:5.0%}"
        error = "" if row.error is None else f"err {row.error:.1e}"
        click.echo(f"  {us} us {share:>5}  {row.kernel:<10} {row.setting:<60} {error} {row.note}")


if __name__ == "__main__":
    main()
