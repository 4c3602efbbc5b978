"""Time the linears of a model's layer and its head on a GPU at sizes of a decode step, beside the library's.

`python -m piecegraph.tools.bench.kernels.linear --help` lists the options. Calls of one linear follow each other in a
CUDA graph, over copies of its weight that together exceed the GPU's L2; results are checked against torch before they
are timed. The library's form is a matmul and, where the linear has an activation, our kernel for that. One row is also
timed after a residual add and its norm, where a layer has them before the linear: "norm+", with our kernel for those
in the library's form.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch
import torch.nn.functional as F

from piecegraph.passes.kernels.common.gpu_limits import SMALL_WEIGHT_BYTES, gpu_limits
from piecegraph.passes.kernels.linear.linear_config import (
    NUM_SLICES,
    SLICED_ROWS,
    WAVE_AHEAD,
    Config,
    LinearConfig,
    SlicedConfig,
    linear_config,
    norm_linear_config,
)
from piecegraph.passes.kernels.linear.streamed_config import StreamedConfig, padded_rows
from piecegraph.passes.ops.act_mul import act_mul
from piecegraph.passes.ops.rms_norm import add_rms_norm
from piecegraph.tools.bench.kernels.attention import (
    READ_FLOOR_BYTES_PER_S,
    compile_ahead,
    ints,
    microseconds,
    short,
)
from piecegraph.tools.bench.kernels.gpu import describe, gpu_of_benchmark
from piecegraph.tools.command_line.shapes import SHAPES

POOL_BYTES = 512 * 2**20
"""The least size of the weights that one replay reads, several times an L2."""

MIN_CALLS = 4
MAX_CALLS = 128

SHARED_BYTES = 227 * 2**10
"""The most shared memory that a program's stages take in a sweep: that of a Hopper GPU."""

MOST_STREAMED_ROWS = 128
"""The most rows for which a sweep tries streamed layouts: twice as many as any are taken for."""

TOLERANCE = 1e-2
"""Relative root mean square error above which a result is called wrong; rounding in bfloat16 takes about a quarter."""

MODELS = ("qwen3-0.6b", "llama-8b")

KERNELS = ("matvec", "sliced", "streamed", "matmul")

Kernel = tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]
"""A kernel's name, its setting, and a function that calls it with a weight."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear `[num_rows, size] @ [num_columns, size].T`; one with an activation has twice the columns, which it
    joins.
    """

    name: str
    num_columns: int
    size: int
    activation: str = ""
    follows_norm: bool = False  # of a residual's sum

    @property
    def num_weight_rows(self) -> int:
        return self.num_columns * (2 if self.activation else 1)

    @property
    def weight_bytes(self) -> int:
        return self.num_weight_rows * self.size * 2

    @property
    def floor_us(self) -> float:
        return self.weight_bytes / READ_FLOOR_BYTES_PER_S * 1e6


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. `us` is None if it failed; `note` says how, or what is special."""

    model: str
    linear: str
    num_rows: int
    kernel: str
    setting: str
    us: float | None
    floor_us: float
    error: float | None = None  # relative root mean square, to torch in float32
    note: str = ""


def linears_of(model: str, num_ranks: int = 1) -> tuple[Linear, ...]:
    """Return the linears of one layer, with projections merged as the passes merge them, and the head.

    Of several ranks they are the share of one, which has its part of the heads, of the MLP and of the vocabulary.
    """
    shape = SHAPES[model]
    hidden, inner, head_dim = shape["hidden_size"], shape["intermediate_size"] // num_ranks, shape["head_dim"]
    num_q_heads, num_kv_heads = shape["num_attention_heads"] // num_ranks, shape["num_key_value_heads"] // num_ranks
    return (
        Linear(name="qkv", num_columns=(num_q_heads + 2 * num_kv_heads) * head_dim, size=hidden, follows_norm=True),
        Linear(name="output", num_columns=hidden, size=num_q_heads * head_dim),
        Linear(name="gate_up", num_columns=inner, size=hidden, activation=shape["hidden_act"], follows_norm=True),
        Linear(name="down", num_columns=hidden, size=inner),
        Linear(name="head", num_columns=shape["vocab_size"] // num_ranks, size=hidden),
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", "models", type=click.Choice(MODELS), multiple=True, default=MODELS)
@click.option("--linear", "names", multiple=True, help="Only these: qkv, output, gate_up, down, head.")
@click.option("--rows", default="1,8,32,128,256", help="Comma-separated numbers of rows.")
@click.option("--sweep", is_flag=True, help="Also time a grid of other layouts, of each of our kernels that can.")
@click.option(
    "--kernel", "kinds", multiple=True, help="Only these kernels in a sweep: matvec, sliced, streamed, matmul."
)
@click.option("--jobs", default=8, help="Threads that compile a sweep's settings ahead.")
@click.option("--top", default=6, help="Settings of a sweep that are shown, best first.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all rows here.")
def main(
    models: Sequence[str],
    names: Sequence[str],
    rows: str,
    sweep: bool,
    kinds: Sequence[str],
    jobs: int,
    top: int,
    json_file: Path | None,
) -> None:
    """Time linears; the floor is the weight, read once at 4.08 TB/s."""
    device = gpu_of_benchmark()
    click.echo(f"{describe(device)}, bfloat16")
    found: list[Row] = []
    for model in models:
        for linear in linears_of(model):
            if names and linear.name not in names:
                continue
            weights = _make_weights(linear, device)
            for num_rows in ints(rows):
                timed = _time(model, linear, num_rows, weights, kinds or (KERNELS if sweep else ()), jobs)
                found += timed
                _show(timed, top)
                if json_file is not None:
                    json_file.write_text(json.dumps([dataclasses.asdict(row) for row in found], indent=1))
            del weights


def _make_weights(linear: Linear, device: torch.device) -> list[torch.Tensor]:
    random = torch.Generator(device=device).manual_seed(0)
    copies = max(2, -(-POOL_BYTES // linear.weight_bytes))
    shape = (linear.num_weight_rows, linear.size)
    return [
        torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=linear.size**-0.5, generator=random)
        for _ in range(copies)
    ]


def _time(
    model: str, linear: Linear, num_rows: int, weights: Sequence[torch.Tensor], swept: Sequence[str], jobs: int
) -> list[Row]:
    from piecegraph.passes.kernels.linear.linear import linear_on_gpu

    x = _random(num_rows, linear.size, weights[0].device)
    default = linear_config(
        num_rows, linear.num_columns, linear.size,
        is_gated=bool(linear.activation), itemsize=2, gpu=gpu_limits(x.get_device()),
    )  # fmt: skip
    others = [config for config in layouts(linear, num_rows) if config != default and kernel_of(config) in swept]
    named = [] if default is None else [(default, f"default: {setting(default)}")]
    settings = [*named, *((config, setting(config)) for config in others)]

    def library(weight: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, weight)
        return act_mul(out, linear.activation) if linear.activation else out

    kernels: list[Kernel] = [("library", "", library)]
    kernels += [
        (kernel_of(config), text, partial(linear_on_gpu, x, bias=None, activation=linear.activation, config=config))
        for config, text in settings
    ]
    rows = _time_kernels(model, linear, num_rows, kernels, weights, _expected(x, weights[0], linear.activation), jobs)
    if linear.follows_norm and num_rows == 1:
        rows += _time_after_norm(model, linear, x, swept, weights, jobs)
    return rows


def _time_after_norm(
    model: str,
    linear: Linear,
    x: torch.Tensor,
    swept: Sequence[str],
    weights: Sequence[torch.Tensor],
    jobs: int,
) -> list[Row]:
    from piecegraph.passes.kernels.norm.norm_linear import add_norm_linear_on_gpu

    residual, eps = _random(2, linear.size, x.device)[1:], 1e-6

    def library(weight: torch.Tensor) -> torch.Tensor:
        normed, _ = add_rms_norm(x, residual, None, eps, 0.0)
        out = F.linear(normed, weight)
        return act_mul(out, linear.activation) if linear.activation else out

    def ours(config: LinearConfig) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda weight: add_norm_linear_on_gpu(
            x, residual, None, eps, 0.0, weight, None, linear.activation, config
        )[0]

    default = norm_linear_config(linear.size, linear.weight_bytes, is_gated=bool(linear.activation))
    others = [each for each in layouts(linear, 1) if isinstance(each, LinearConfig) and each != default]
    settings = [] if default is None else [(default, f"default: {setting(default)}")]
    settings += [(each, setting(each)) for each in others if "matvec" in swept]
    kernels: list[Kernel] = [("norm+library", "", library)]
    kernels += [(f"norm+{kernel_of(config)}", text, ours(config)) for config, text in settings]
    normed, _ = add_rms_norm(x, residual, None, eps, 0.0)
    return _time_kernels(model, linear, 1, kernels, weights, _expected(normed, weights[0], linear.activation), jobs)


def _random(num_rows: int, size: int, device: torch.device) -> torch.Tensor:
    random = torch.Generator(device=device).manual_seed(num_rows)
    return torch.randn(num_rows, size, generator=random, device=device).to(torch.bfloat16)


def _time_kernels(
    model: str,
    linear: Linear,
    num_rows: int,
    kernels: Sequence[Kernel],
    weights: Sequence[torch.Tensor],
    expected: torch.Tensor,
    jobs: int,
) -> list[Row]:
    if len(kernels) > 2:
        compile_ahead([partial(_run, call, weights[0]) for _, _, call in kernels], weights[0].device, jobs)
    num_calls = min(MAX_CALLS, max(MIN_CALLS, len(weights)))
    rows = []
    for kernel, text, call in kernels:
        us, error, note = None, None, ""
        try:
            error = float((call(weights[0]).float() - expected).norm() / expected.norm())
            note = "" if error < TOLERANCE else "WRONG"
            us = microseconds([partial(_run, call, weights[number % len(weights)]) for number in range(num_calls)])
        except Exception as failure:  # a setting that does not fit the GPU: go on
            note = short(failure)
        rows.append(
            Row(
                model=model, linear=linear.name, num_rows=num_rows, kernel=kernel, setting=text, us=us,
                floor_us=linear.floor_us, error=error, note=note,
            )
        )  # fmt: skip
    return rows


def _run(call: Callable[[torch.Tensor], object], weight: torch.Tensor) -> None:
    call(weight)


def _expected(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    out = x.float() @ weight.float().t()
    return act_mul(out, activation) if activation else out


def kernel_of(config: Config) -> str:
    if isinstance(config, StreamedConfig):
        return "streamed"
    return "sliced" if isinstance(config, SlicedConfig) else "matvec" if config.block_m == 0 else "matmul"


def setting(config: Config) -> str:
    if isinstance(config, StreamedConfig):
        columns = f"{config.num_columns}{' joined' if config.is_joined else ''} of {config.block_n}"
        return f"m={config.block_m} n={columns} k={config.block_k} {config.num_warps}w {config.num_stages}s"
    if isinstance(config, SlicedConfig):
        return f"n={config.block_n} k={config.num_slices}x{config.block_k} held {config.num_held} of {config.num_tiles}"
    ahead = f" ahead={config.num_ahead}" if config.num_ahead else ""
    return f"m={config.block_m} n={config.block_n} k={config.block_k} {config.num_warps}w {config.num_stages}s{ahead}"


def layouts(linear: Linear, num_rows: int) -> list[Config]:
    """Return a grid of layouts of each kernel that takes `num_rows` rows, for weights of any size."""
    found: list[Config] = []
    num_halves = 2 if linear.activation else 1
    if num_rows in (1, 2, 4):
        shapes = itertools.product((1, 2, 4, 8, 16), (512, 1024, 2048, 4096), (1, 2, 4, 8))
        found += [
            LinearConfig(block_m=0, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=1)
            for block_n, block_k, warps in shapes
            if block_k <= linear.size and 32 * warps * 16 <= block_n * block_k * num_halves <= 32 * warps * 128
        ]
    if num_rows <= SLICED_ROWS:
        for block_n, block_k in itertools.product((8, 16, 32, 64), (64, 128, 256)):
            if linear.size % (NUM_SLICES * block_k) == 0 and block_n * block_k <= 8192:
                tiles = linear.size // (NUM_SLICES * block_k)
                found += [
                    SlicedConfig(
                        block_m=SLICED_ROWS, block_n=block_n, num_slices=NUM_SLICES, block_k=block_k, num_tiles=tiles,
                        num_held=held,
                    )
                    for held in (1, 2, 3)
                    if held <= tiles
                ]  # fmt: skip
    if 1 < num_rows <= MOST_STREAMED_ROWS:
        found += streamed_layouts(linear, num_rows)
    if num_rows > 1:
        tallest = 16 if num_rows <= 16 else 64 if num_rows <= 64 else 128
        blocks = itertools.product({tallest, min(tallest, 64)}, (16, 32, 64, 128), (64, 128), (4, 8), (3, 4, 6, 8))
        is_large = linear.weight_bytes > SMALL_WEIGHT_BYTES  # L2 has no room for all of it
        found += [
            LinearConfig(
                block_m=block_m,
                block_n=block_n,
                block_k=block_k,
                num_warps=warps,
                num_stages=stages,
                num_ahead=WAVE_AHEAD if is_large else 0,
            )
            for block_m, block_n, block_k, warps, stages in blocks
            if linear.size % block_k == 0
            and block_m * block_n * num_halves <= 32 * warps * 128
            and (block_m + block_n * num_halves) * block_k * 2 * stages <= SHARED_BYTES
        ]
    return found


def streamed_layouts(linear: Linear, num_rows: int) -> list[Config]:
    """Return a grid of layouts of streamed linears for `num_rows` rows."""
    tiles = [(64, columns, False) for columns in (24, 32, 48, 64)] + [(128, 128, False)]
    if linear.activation:
        tiles += [(64, columns, True) for columns in (24, 32)]
    blocks = itertools.product(
        {8, 16} if num_rows <= 8 else {padded_rows(num_rows)}, tiles, (64, 128, 256, 512), (2, 3, 4, 5, 6)
    )
    return [
        StreamedConfig(
            block_m=block_m, block_n=block_n, num_columns=columns, is_joined=is_joined, block_k=block_k,
            num_stages=stages, num_warps=8 if num_rows > 32 and block_n == 128 else 4,
        )
        for block_m, (block_n, columns, is_joined), block_k, stages in blocks
        if linear.size % block_k == 0
        and (block_n * (2 if linear.activation and not is_joined else 1) * stages + block_m) * block_k * 2
        <= SHARED_BYTES
    ]  # fmt: skip


def _show(rows: Sequence[Row], top: int) -> None:
    """Print the library and the default first, then the best of a sweep; linears after a norm are printed apart."""
    first = rows[0]
    click.echo(f"\n{first.model} {first.linear}, {first.num_rows} rows: floor {first.floor_us:.1f} us")
    for has_norm in (False, True):
        alike = [row for row in rows if row.kernel.startswith("norm+") is has_norm]
        named = [row for row in alike if row.kernel.endswith("library") or row.setting.startswith("default")]
        swept = sorted((row for row in alike if row not in named), key=lambda row: row.us or float("inf"))
        for row in (*named, *swept[:top]):
            us = "   failed" if row.us is None else f"{row.us:9.2f}"
            error = "" if row.error is None else f"err {row.error:.1e}"
            click.echo(f"  {us} us  {row.kernel:<12} {row.setting:<44} {error} {row.note}")


if __name__ == "__main__":
    main()
