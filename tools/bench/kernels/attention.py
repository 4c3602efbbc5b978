"""Time our decode attention kernel on a GPU over a grid of layouts, beside the floor and flash-attn.

`python -m piecegraph.tools.bench.kernels.attention --help` lists the options. Every setting is checked against torch
before it is timed; one that fails is reported and the rest go on. A call includes the write of the new keys and values
and the combination of splits. Calls are timed in one CUDA graph, over caches that together exceed the GPU's L2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from piecegraph.passes.kernels.common.gpu_limits import GpuLimits
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.interface.rotary import Rotary
from piecegraph.runner.attention.triton.layouts.decode_config import (
    SPLIT_BOUNDS,
    DecodeConfig,
    decode_config,
    num_head_blocks,
)
from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape
from piecegraph.runner.attention.triton.reference import rotated
from piecegraph.tools.bench.kernels.gpu import describe, gpu_of_benchmark

READ_FLOOR_BYTES_PER_S = 4.08e12
"""The rate at which a matrix-vector product reads on an H200."""

POOL_BYTES = 512 * 2**20
"""The least size of the caches that a graph reads, several times an L2."""

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative root mean square error above which a setting is called wrong; rounding takes about a third of it."""

DEFAULT_CASES = "1x1024,1x4096,1x32768,8x1024,32x600,32x1024,64x1024,128x1024,256x1024"


@dataclass(frozen=True, kw_only=True)
class Shape:
    batch: int
    context: int  # tokens of each request, the new one included
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def heads(self) -> HeadShape:
        return HeadShape(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            dtype=self.dtype,
        )

    @property
    def kv_bytes(self) -> int:
        return 2 * self.batch * self.context * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def floor_us(self) -> float:
        return self.kv_bytes / READ_FLOOR_BYTES_PER_S * 1e6


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One batch, and enough disjoint caches for it that none is still in L2 when its turn comes again."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    kv_cache: KVCache
    block_tables: list[torch.Tensor]
    slot_mappings: list[torch.Tensor]
    seq_lens: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. `us` is None if the setting failed; `note` says how, or what is special."""

    case: str
    kernel: str
    setting: str
    us: float | None
    floor_us: float
    error: float | None = None  # relative root mean square, to torch in float32
    note: str = ""

    @property
    def share(self) -> float | None:
        return None if self.us is None else self.floor_us / self.us


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--cases", default=DEFAULT_CASES, help="Comma-separated batch x context.")
@click.option("--q-heads", default=16)
@click.option("--kv-heads", default=8)
@click.option("--head-dim", default=128)
@click.option("--block-size", default=16)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16")
@click.option("--block-n", default="32,64,128", help="Keys a tile.")
@click.option("--warps", default="1,2,4")
@click.option("--stages", default="3,4")
@click.option("--per-sm", default="1,2,3,4", help="Programs an SM, which gives the number of splits.")
@click.option("--min-split", default="64", help="Fewest keys a split.")
@click.option("--carry-pages/--no-carry-pages", default=True, help="Look up blocks one tile ahead.")
@click.option("--pdl/--no-pdl", default=False, help="Also try programmatic dependent launch.")
@click.option("--top", default=8, help="Settings shown a case, best first.")
@click.option("--default-only", is_flag=True, help="Time only the setting `decode_config` picks.")
@click.option("--flash/--no-flash", default=True, help="Time flash-attn 2 and 4 too, where they can be imported.")
@click.option("--rotary", is_flag=True, help="Also time the default with rotary embedding, and with a norm, fused.")
@click.option("--host", is_flag=True, help="Also time what a launch costs the host, ordinary and prepared.")
@click.option("--jobs", default=8, help="Threads that compile settings ahead.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all rows here.")
def main(
    cases: str,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: str,
    block_n: str,
    warps: str,
    stages: str,
    per_sm: str,
    min_split: str,
    carry_pages: bool,
    pdl: bool,
    top: int,
    default_only: bool,
    flash: bool,
    rotary: bool,
    host: bool,
    jobs: int,
    json_file: Path | None,
) -> None:
    """Time decode attention over a grid of layouts, and print the best setting of each case first."""
    device = gpu_of_benchmark()
    gpu = GpuLimits.of(device)
    num_sms = gpu.num_sms
    click.echo(f"{describe(device)}, {num_sms} SMs")
    click.echo(f"{q_heads}/{kv_heads} heads of {head_dim}, {dtype}, blocks of {block_size}; floor at 4.08 TB/s")
    rows: list[Row] = []
    for batch, context in (_parse_case(case) for case in cases.split(",")):
        shape = Shape(
            batch=batch, context=context, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim,
            block_size=block_size, dtype=getattr(torch, dtype),
        )  # fmt: skip
        default = decode_config(
            shape.heads, num_reqs=batch, max_len=context, num_sms=num_sms, shared_bytes=gpu.shared_bytes,
            can_overlap=gpu.can_overlap,
        )  # fmt: skip
        grid = [default]
        if not default_only:
            grid += [
                config
                for config in _configs(
                    shape, num_sms, ints(block_n), ints(warps), ints(stages), ints(per_sm), ints(min_split),
                    carry_pages, (False, True) if pdl else (False,),
                )
                if config != default
            ]  # fmt: skip
        found = _time_case(shape, grid, device, jobs)
        if rotary:
            found += _time_rotary(shape, default, device)
        if flash:
            found += _time_flash(shape, device)
        if host:
            _show_host_cost(shape, device)
        found.sort(key=lambda row: row.us if row.us is not None else float("inf"))
        rows += found
        show(found, top)
        if json_file is not None:
            json_file.write_text(
                json.dumps([{**dataclasses.asdict(row), "share": row.share} for row in rows], indent=1)
            )


def _parse_case(text: str) -> tuple[int, int]:
    batch, _, context = text.strip().partition("x")
    if not (batch.isdigit() and context.isdigit()):
        raise click.UsageError(f"--cases: {text!r} is not BATCHxCONTEXT, such as 32x1024.")
    return int(batch), int(context)


def ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _configs(
    shape: Shape,
    num_sms: int,
    block_ns: Sequence[int],
    warps: Sequence[int],
    stages: Sequence[int],
    per_sm: Sequence[int],
    min_splits: Sequence[int],
    carry_pages: bool,
    pdls: Sequence[bool],
) -> Iterator[DecodeConfig]:
    programs = shape.batch * num_head_blocks(shape.heads)
    for n, num_warps, num_stages, pdl in itertools.product(block_ns, warps, stages, pdls):
        tiles = -(-shape.context // n)
        splits = {max(1, min(count * num_sms // programs, tiles, SPLIT_BOUNDS[-1])) for count in per_sm}
        for num_splits, min_split_len in itertools.product(sorted(splits), min_splits):
            yield DecodeConfig(
                block_n=n,
                num_warps=num_warps,
                num_stages=num_stages,
                num_splits=num_splits,
                min_split_len=min_split_len,
                carry_pages=carry_pages,
                pdl=pdl,
            )


def _time_case(shape: Shape, grid: Sequence[DecodeConfig], device: torch.device, jobs: int) -> list[Row]:
    inputs = _make_inputs(shape, device)
    expected = _expected(shape, inputs)
    compile_ahead([partial(_launch_once, shape, inputs, config, device) for config in grid], device, jobs)
    case = f"{shape.batch}x{shape.context}"
    rows = []
    for number, config in enumerate(grid):
        setting = _setting(config) + ("  (default)" if number == 0 else "")
        us, error, note = None, None, ""
        try:
            calls = _triton_calls(shape, inputs, config, device)
            inputs.out.fill_(float("nan"))
            calls[0]()
            calls[0]()  # the second launch finds the workspace as the first one left it
            error = float((inputs.out.float() - expected).norm() / expected.norm())
            if not error < TOLERANCE[shape.dtype]:
                note = "WRONG"
            us = microseconds(calls)
        except Exception as failure:  # a setting that does not fit the GPU: report it, go on
            note = short(failure)
        rows.append(
            Row(case=case, kernel="triton", setting=setting, us=us, floor_us=shape.floor_us, error=error, note=note)
        )
    return rows


def _time_rotary(shape: Shape, config: DecodeConfig, device: torch.device) -> list[Row]:
    """Time the kernel that also norms and rotates, over the inputs of the kernel that does not."""
    inputs = _make_inputs(shape, device)
    random = torch.Generator(device=device).manual_seed(1)
    angles = torch.rand(shape.batch, shape.head_dim, generator=random, device=device) * 6.3
    weight = torch.randn(shape.head_dim, generator=random, device=device).to(shape.dtype)
    plain = Rotary(cos=angles.cos(), sin=angles.sin())
    normed = dataclasses.replace(plain, q_norm_weight=weight, k_norm_weight=weight, norm_eps=1e-6)
    rows = []
    for kernel, rotary in (("+ rotary", plain), ("+ norm", normed)):
        query, key = rotated(inputs.query, inputs.key, rotary)
        expected = _expected(shape, dataclasses.replace(inputs, query=query, key=key))
        calls = _triton_calls(shape, inputs, config, device, rotary)
        calls[0]()
        error = float((inputs.out.float() - expected).norm() / expected.norm())
        rows.append(
            Row(
                case=f"{shape.batch}x{shape.context}", kernel=kernel, setting=_setting(config),
                us=microseconds(calls), floor_us=shape.floor_us, error=error,
                note="" if error < TOLERANCE[shape.dtype] else "WRONG",
            )
        )  # fmt: skip
    return rows


def _launch_once(shape: Shape, inputs: Inputs, config: DecodeConfig, device: torch.device) -> None:
    _triton_calls(shape, inputs, config, device)[0]()


def _setting(config: DecodeConfig) -> str:
    text = (
        f"n={config.block_n} warps={config.num_warps} stages={config.num_stages} splits={config.num_splits} "
        f"min={config.min_split_len}"
    )
    return text + ("" if config.carry_pages else " no-carry") + (" pdl" if config.pdl else "")


def _make_inputs(shape: Shape, device: torch.device) -> Inputs:
    random = torch.Generator(device=device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, device=device, dtype=torch.float32).to(shape.dtype)

    blocks_each = -(-shape.context // shape.block_size)
    per_copy = shape.batch * blocks_each
    num_copies = max(2, -(-POOL_BYTES // shape.kv_bytes))
    size = (num_copies * per_copy, shape.block_size, shape.num_kv_heads, shape.head_dim)
    key_cache = torch.empty(size, dtype=shape.dtype, device=device).normal_(generator=random)
    value_cache = torch.empty(size, dtype=shape.dtype, device=device).normal_(generator=random)
    shuffled = torch.randperm(num_copies * per_copy, generator=random, device=device).to(torch.int32)
    block_tables = list(shuffled.view(num_copies, shape.batch, blocks_each).unbind())
    last = shape.context - 1
    return Inputs(
        query=normal(shape.batch, shape.num_q_heads, shape.head_dim),
        key=normal(shape.batch, shape.num_kv_heads, shape.head_dim),
        value=normal(shape.batch, shape.num_kv_heads, shape.head_dim),
        out=torch.empty(shape.batch, shape.num_q_heads, shape.head_dim, dtype=shape.dtype, device=device),
        kv_cache=KVCache(key_cache, value_cache),
        block_tables=block_tables,
        slot_mappings=[
            table[:, last // shape.block_size].long() * shape.block_size + last % shape.block_size
            for table in block_tables
        ],
        seq_lens=torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device),
    )


def _expected(shape: Shape, inputs: Inputs) -> torch.Tensor:
    """Return torch's attention in float32, computed one request at a time: `[batch, num_q_heads, head_dim]`."""
    results = []
    for request in range(shape.batch):
        blocks = inputs.block_tables[0][request].long()
        key, value = (
            torch.cat([cached[blocks].flatten(0, 1)[: shape.context - 1], new[request : request + 1]]).float()
            for cached, new in ((inputs.kv_cache.key, inputs.key), (inputs.kv_cache.value, inputs.value))
        )
        query = inputs.query[request].float().unflatten(0, (shape.num_kv_heads, -1))  # [kv heads, group, dim]
        scores = torch.einsum("hgd,nhd->hgn", query, key) * shape.head_dim**-0.5
        results.append(torch.einsum("hgn,nhd->hgd", scores.softmax(-1), value).flatten(0, 1))
    return torch.stack(results)


def _triton_calls(
    shape: Shape, inputs: Inputs, config: DecodeConfig, device: torch.device, rotary: Rotary | None = None
) -> list[Callable[[], None]]:
    """Return one call for each copy of the cache."""
    from piecegraph.runner.attention.triton.kernels.decode import decode_call
    from piecegraph.runner.attention.triton.kernels.workspace import SplitWorkspace

    num_partials = shape.batch * shape.num_q_heads * config.num_splits
    workspace = SplitWorkspace.allocate(
        num_partials=num_partials,
        num_values=num_partials * shape.head_dim,
        num_counts=shape.batch * num_head_blocks(shape.heads),
        device=device,
    )

    def call(table: torch.Tensor, slots: torch.Tensor) -> Callable[[], None]:
        return lambda: decode_call(
            AttentionCall(
                inputs.query, inputs.key, inputs.value, inputs.out, shape.head_dim**-0.5, rotary=rotary
            ),
            inputs.kv_cache, seq_lens=inputs.seq_lens, block_table=table, slot_mapping=slots, num_reqs=shape.batch,
            workspace=workspace, config=config,
        ).launch()  # fmt: skip

    return [call(table, slots) for table, slots in zip(inputs.block_tables, inputs.slot_mappings, strict=True)]


def compile_ahead(launches: Sequence[Callable[[], None]], device: torch.device, jobs: int) -> None:
    """Launch each kernel that has to be compiled once, from several threads.

    Most of a compile runs without Python's global lock.
    """
    torch.cuda.synchronize(device)

    def attempt(launch: Callable[[], None]) -> None:
        with torch.cuda.device(device), contextlib.suppress(Exception):  # found again, and reported, when it is timed
            launch()

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        list(pool.map(attempt, launches))
    torch.cuda.synchronize(device)


def microseconds(calls: Sequence[Callable[[], None]], repeats: int = 9, warm_up_s: float = 0.0) -> float:
    """Return the median microseconds per call, over replays of one graph that holds all calls.

    `warm_up_s` is the time in seconds for which the graph is replayed before it is timed, so that a GPU reaches its
    power limit.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    end_of_warm_up = time.monotonic() + warm_up_s
    while time.monotonic() < end_of_warm_up:
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3 / len(calls))
    return statistics.median(times)


def _show_host_cost(shape: Shape, device: torch.device) -> None:
    """Print the host's microseconds for one layer's attention, through the backend, while the GPU keeps up."""
    from piecegraph.runner.attention.triton.backend import TritonBackend

    inputs = _make_inputs(shape, device)
    layer = AttentionLayer(
        name="layer", num_q_heads=shape.num_q_heads, num_kv_heads=shape.num_kv_heads, key_dim=shape.head_dim,
        value_dim=shape.head_dim, dtype=shape.dtype, scale=shape.head_dim**-0.5, window=0, softcap=0.0,
        has_sinks=False,
    )  # fmt: skip
    backend = TritonBackend()
    builder = backend.metadata_builder([layer], shape.block_size, device, max_num_reqs=max(256, shape.batch))
    common = AttentionMetadata(
        num_reqs=shape.batch, num_tokens=shape.batch, max_query_len=1, num_decode_reqs=shape.batch,
        query_start_loc=torch.arange(shape.batch + 1, dtype=torch.int32, device=device),
        seq_lens=torch.ones_like(inputs.seq_lens),  # the shortest there are, so that the GPU does not hold the host up
        block_table=inputs.block_tables[0], slot_mapping=inputs.slot_mappings[0], host=None,
    )  # fmt: skip
    call = AttentionCall(inputs.query, inputs.key, inputs.value, inputs.out, layer.scale)
    impl = backend.impl()
    metadata = builder.build(common)
    launch = impl.prepare(call, inputs.kv_cache)
    costs = {
        "build metadata": _host_microseconds(lambda: builder.build(common)),
        "forward": _host_microseconds(lambda: impl.forward(call, inputs.kv_cache, metadata)),
        "prepared launch": _host_microseconds(lambda: launch(metadata)),
    }
    click.echo("\nhost: " + ", ".join(f"{name} {us:.2f} us" for name, us in costs.items()))


def _host_microseconds(call: Callable[[], object], repeats: int = 20, calls: int = 100) -> float:
    """Return the best of `repeats` runs, each of so few calls that none waits for room in the GPU's queue."""
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return best


def _time_flash(shape: Shape, device: torch.device) -> list[Row]:
    """Time flash-attn 2 (pages of 256, writes the new keys and values) and 4 (pages of 128, does not)."""
    rows = []
    for name, page, module, make in (
        ("flash-attn 2", 256, "flash_attn", _flash2_call),
        ("flash-attn 4", 128, "flash_attn.cute", _flash4_call),
    ):
        try:
            library = importlib.import_module(module)
        except Exception:
            continue
        us, note = None, "" if page == 256 else "no K/V write"
        try:
            inputs = _make_inputs(dataclasses.replace(shape, block_size=page), device)
            calls = [make(library, inputs, copy) for copy in range(len(inputs.block_tables))]
            calls[0]()
            us = microseconds(calls)
        except Exception as failure:
            note = short(failure)
        case = f"{shape.batch}x{shape.context}"
        rows.append(Row(case=case, kernel=name, setting=f"pages of {page}", us=us, floor_us=shape.floor_us, note=note))
    return rows


def _flash2_call(library: Any, inputs: Inputs, copy: int) -> Callable[[], None]:
    cached = inputs.seq_lens - 1
    query, key, value = (x.unsqueeze(1) for x in (inputs.query, inputs.key, inputs.value))

    def call() -> None:
        library.flash_attn_with_kvcache(
            query, inputs.kv_cache.key, inputs.kv_cache.value, k=key, v=value, cache_seqlens=cached,
            block_table=inputs.block_tables[copy], causal=True,
        )  # fmt: skip

    return call


def _flash4_call(library: Any, inputs: Inputs, copy: int) -> Callable[[], None]:
    batch = inputs.query.shape[0]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=inputs.query.device)

    def call() -> None:
        library.flash_attn_varlen_func(
            inputs.query, inputs.kv_cache.key, inputs.kv_cache.value, cu_seqlens_q=starts, max_seqlen_q=1,
            seqused_k=inputs.seq_lens, page_table=inputs.block_tables[copy], causal=True,
        )  # fmt: skip

    return call


def short(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".replace("\n", " ")[:120]


def show(rows: Sequence[Row], top: int) -> None:
    """Print the best `top` rows, and the rows that are always wanted wherever they rank."""
    click.echo(f"\n{rows[0].case}: floor {rows[0].floor_us:.1f} us")
    for place, row in enumerate(rows):
        if place >= top and row.kernel == "triton" and "default" not in row.setting and row.note != "WRONG":
            continue
        us = "   failed" if row.us is None else f"{row.us:9.2f}"
        share = "" if row.share is None else f"{row.share:5.0%}"
        error = "" if row.error is None else f"err {row.error:.1e}"
        click.echo(f"  {us} us {share:>5}  {row.kernel:<12} {row.setting:<48} {error} {row.note}")
    failed = [row for row in rows if row.us is None]
    if failed:
        click.echo(f"  {len(failed)} settings failed; the first: {failed[0].setting}: {failed[0].note}")


if __name__ == "__main__":
    main()
