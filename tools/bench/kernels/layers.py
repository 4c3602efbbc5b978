"""Time the layers of a decode step on a GPU together, as they run in a model, and sweep the layouts of one of them.

`python -m piecegraph.tools.bench.kernels.layers --help` lists the options. All layers are in one CUDA graph, as a
model's are. The output is compared with that of the default layouts: so a wrong layout is noticed, but a wrong default
is not; `linear`, `attention` and the tests check those.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch

from piecegraph.passes.kernels.common.gpu_limits import gpu_limits
from piecegraph.passes.kernels.linear.linear_config import WAVE_AHEAD, Config
from piecegraph.passes.kernels.linear.split_linear_config import SplitConfig
from piecegraph.passes.kernels.linear.streamed_config import MAX_ROWS, StreamedConfig, padded_rows
from piecegraph.runner.attention.triton.layouts.decode_config import DecodeConfig, num_head_blocks
from piecegraph.tools.bench.kernels.attention import (
    READ_FLOOR_BYTES_PER_S,
    compile_ahead,
    ints,
    microseconds,
    short,
)
from piecegraph.tools.bench.kernels.gpu import describe, gpu_of_benchmark
from piecegraph.tools.bench.kernels.layer_chain import LayerChain, LayerShape, Layouts, is_in_parts
from piecegraph.tools.bench.kernels.linear import MODELS, SHARED_BYTES, Linear, linears_of, setting, streamed_layouts
from piecegraph.tools.bench.kernels.linear import layouts as layouts_of

SWEPT = ("attention", "qkv", "output", "gate_up", "down")

MAX_ERROR = 0.1
"""The relative difference above which a layout counts as wrong. Rounding errors add up over layers: 0.02 is usual."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. `us` is None if it failed; `note` says how."""

    model: str
    batch: int
    what: str
    setting: str
    us: float | None  # a layer
    error: float | None = None  # relative, to what the layouts that are taken by themselves give
    note: str = ""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", type=click.Choice((*MODELS, "llama-70b")), default="qwen3-0.6b")
@click.option(
    "--shard-of", "num_ranks", type=click.IntRange(1, 8), default=1, help="Time the share of one of these ranks."
)
@click.option("--batch", default="1,8,32,128,256", help="Comma-separated numbers of requests.")
@click.option("--context", default=580, help="Tokens of each request, the new one included.")
@click.option("--layers", type=int, help="Of the chain; the model's own number if not given.")
@click.option(
    "--sweep", "swept", type=click.Choice(SWEPT), multiple=True, help="Try other layouts of this; repeatable."
)
@click.option(
    "--seconds",
    default=0.0,
    help="Seconds to replay a graph before it is timed, so that the GPU reaches its power limit.",
)
@click.option("--jobs", default=8, help="Threads that compile a sweep's layouts ahead.")
@click.option("--top", default=6, help="Layouts of a sweep that are shown, best first.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all rows here.")
def main(
    model: str,
    num_ranks: int,
    batch: str,
    context: int,
    layers: int | None,
    swept: Sequence[str],
    seconds: float,
    jobs: int,
    top: int,
    json_file: Path | None,
) -> None:
    """Time layers in microseconds; the floor is a layer's weights, keys and values, read once at 4.08 TB/s.

    The share of one of several ranks has norms of their own and no sums over the ranks.
    """
    if LayerShape.of(model).heads.num_kv_heads % num_ranks:
        raise click.BadParameter(f"{num_ranks} ranks cannot divide the key/value heads of {model} evenly.")
    device = gpu_of_benchmark()
    shape = LayerShape.of(model, num_ranks)
    click.echo(f"{describe(device)}, bfloat16")
    rows: list[Row] = []
    for number in ints(batch):
        chain = LayerChain(shape, number, context, layers or shape.num_layers, device)
        floor = (shape.weight_bytes + shape.kv_bytes(number, context)) / READ_FLOOR_BYTES_PER_S * 1e6
        click.echo(f"\n{model}, {number} requests of {context} tokens: floor {floor:.1f} us a layer")
        attention, expected = chain.attention_layout(), chain.run(chain.attention_layout(), {}).float()
        found = [
            _timed(chain, "all kernels", "", attention, {}, model, expected, seconds),
            _timed(chain, "without attention", "", None, {}, model, None, seconds),
        ]
        _show(found)
        for what in swept:
            tried = list(_choices(chain, model, num_ranks, what, attention))
            compile_ahead([launch for _, _, _, launch in tried], device, jobs)
            several = [
                _timed(chain, what, text, config, layouts, model, expected, seconds)
                for text, config, layouts, _ in tried
            ]
            _show(sorted(several, key=lambda row: row.us or float("inf"))[:top])
            found += several
        rows += found
        if json_file is not None:
            json_file.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
        del chain


Choice = tuple[str, DecodeConfig, Layouts, Callable[[], None]]
"""A name, the layouts of attention and linears, and a function that launches the new kernel of this choice."""


def _choices(chain: LayerChain, model: str, num_ranks: int, what: str, attention: DecodeConfig) -> Iterator[Choice]:
    if what == "attention":
        for config in attention_layouts(chain, attention):
            yield _attention_setting(config), config, {}, partial(chain.launch_attention, config)
        return
    for layout in linear_layouts(model, what, chain.batch, num_ranks):
        yield linear_setting(layout), attention, {what: layout}, partial(chain.launch_linear, what, layout)


def attention_layouts(chain: LayerChain, default: DecodeConfig) -> list[DecodeConfig]:
    """Return tiles and warps for whole requests, and for splits that fill one to four programs per multiprocessor."""
    num_sms = gpu_limits(chain.x.get_device()).num_sms
    programs = chain.batch * num_head_blocks(chain.shape.heads)
    found: dict[DecodeConfig, None] = {}
    for block_n, num_warps, stages in (
        (32, 2, 3),
        (32, 4, 3),
        (64, 2, 3),
        (64, 4, 3),
        (64, 4, 4),
        (128, 4, 3),
        (128, 8, 3),
    ):
        found[dataclasses.replace(default, block_n=block_n, num_warps=num_warps, num_stages=stages)] = None
        for parts in {max(1, min(each * num_sms // programs, 16)) for each in (1, 2, 3, 4)}:
            config = dataclasses.replace(
                default, block_n=block_n, num_warps=num_warps, num_stages=stages, num_splits=parts, few_splits=parts,
                num_extra=0, min_split_len=64,
            )  # fmt: skip
            found[config] = None
    found.pop(default, None)
    return list(found)


def linear_layouts(model: str, name: str, batch: int, num_ranks: int = 1) -> list[Config | SplitConfig]:
    """Return the layouts of the `linear` bench, and layouts of split sums where a norm follows.

    A sum over ranks takes whole sums. One row of a rank's share, whose norms are kernels of their own, may be streamed.
    """
    linear = next(each for each in linears_of(model, num_ranks) if each.name == name)
    found: list[Config | SplitConfig] = list(layouts_of(linear, batch))
    if num_ranks > 1:
        return [*found, *(streamed_layouts(linear, batch) if batch == 1 else [])]
    if linear.follows_norm:
        return found
    if batch > MAX_ROWS:
        return [*found, *split_layouts(linear, batch)]
    padded = padded_rows(batch)
    for block_k, stages, parts in (
        (k, s, p) for k in (64, 128, 256, 512) for s in (2, 3, 4, 6, 8) for p in (2, 3, 4, 6, 7, 8)
    ):
        shared = (64 * stages + padded) * block_k * 2
        if linear.size % (block_k * parts) == 0 and linear.num_columns % 64 == 0 and shared <= SHARED_BYTES:
            found.append(
                StreamedConfig(
                    block_m=padded, block_n=64, num_columns=64, block_k=block_k, num_stages=stages, num_parts=parts
                )
            )
    return found


def split_layouts(linear: Linear, batch: int) -> list[SplitConfig]:
    """Return layouts of split sums for dozens of rows, with as many tiles on their way as shared memory can hold."""
    found: list[SplitConfig] = []
    blocks_m = {64, 64 if batch <= 64 else 128}
    grid = itertools.product((32, 64, 128), (64, 128), (2, 3, 4, 6, 7, 8), sorted(blocks_m), (1, 2))
    for block_n, block_k, parts, block_m, programs in grid:  # programs: of a multiprocessor
        num_stages = min(10, SHARED_BYTES // programs // ((block_m + block_n) * block_k * 2))
        if linear.size % (block_k * parts) or linear.num_columns % block_n or num_stages < 2:
            continue
        num_tiles = linear.size // block_k // parts
        found.append(
            SplitConfig(
                block_m=block_m, block_n=block_n, block_k=block_k, num_parts=parts, num_tiles=num_tiles,
                num_warps=block_m // 16, num_stages=num_stages, num_ahead=min(WAVE_AHEAD, num_tiles),
            )
        )  # fmt: skip
    return found


def linear_setting(layout: Config | SplitConfig) -> str:
    if isinstance(layout, SplitConfig):
        tile = f"m={layout.block_m} n={layout.block_n} k={layout.block_k} {layout.num_warps}w {layout.num_stages}s"
        return tile + (f" ahead={layout.num_ahead}" if layout.num_ahead else "") + f" parts={layout.num_parts}"
    return setting(layout) + (
        f" parts={layout.num_parts}" if isinstance(layout, StreamedConfig) and is_in_parts(layout) else ""
    )


def _attention_setting(config: DecodeConfig) -> str:
    return f"n={config.block_n} {config.num_warps}w {config.num_stages}s splits={config.num_splits}+{config.num_extra}"


def _timed(
    chain: LayerChain,
    what: str,
    text: str,
    attention: DecodeConfig | None,
    layouts: Layouts,
    model: str,
    expected: torch.Tensor | None,
    seconds: float,
) -> Row:
    us, error, note = None, None, ""
    try:
        found = chain.run(attention, layouts).float()
        if expected is not None:
            error = float((found - expected).norm() / expected.norm())
            note = "" if error < MAX_ERROR else "WRONG"
        us = microseconds([lambda: _run(chain, attention, layouts)], warm_up_s=seconds) / chain.num_layers
    except Exception as failure:  # a layout that does not fit the GPU: go on
        note = short(failure)
    return Row(model=model, batch=chain.batch, what=what, setting=text, us=us, error=error, note=note)


def _run(chain: LayerChain, attention: DecodeConfig | None, layouts: Layouts) -> None:
    chain.run(attention, layouts)


def _show(rows: Sequence[Row]) -> None:
    for row in rows:
        us = "   failed" if row.us is None else f"{row.us:9.2f}"
        error = "" if row.error is None else f"diff {row.error:.1e}"
        click.echo(f"  {us} us  {row.what:<18} {row.setting:<44} {error} {row.note}")


if __name__ == "__main__":
    main()
