"""Time our general attention kernel on a GPU over a grid of layouts, beside flash-attn.

`python -m piecegraph.tools.bench.kernels.attention_prefill --help` lists the options. The write of keys and values is
timed apart: flash-attn's calls here do not include one. Every setting is checked against torch before it is timed.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from piecegraph.passes.kernels.common.gpu_limits import GpuLimits
from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.triton.kernels.workspace import SplitWorkspace
from piecegraph.runner.attention.triton.layouts.head_shape import HeadShape
from piecegraph.runner.attention.triton.layouts.prefill_config import PrefillConfig, prefill_config
from piecegraph.runner.attention.triton.metadata import allocate_workspace
from piecegraph.runner.attention.triton.reference import paged_attention
from piecegraph.tools.bench.kernels.attention import (
    TOLERANCE,
    Row,
    compile_ahead,
    ints,
    microseconds,
    short,
    show,
)
from piecegraph.tools.bench.kernels.gpu import describe, gpu_of_benchmark

FLOOR_FLOPS_PER_S = 0.75e15
"""The rate that a large bfloat16 matrix product reaches on an H200."""

CALLS_A_GRAPH = 10


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of `batch` requests with `query_len` new tokens each, the last ones of `context`."""

    batch: int
    query_len: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.query_len}" + (f"@{self.context}" if self.context != self.query_len else "")

    def floor_us(self, heads: HeadShape) -> float:
        visible = self.batch * self.query_len * (self.context - (self.query_len - 1) / 2)
        return visible * heads.num_q_heads * 2 * (heads.key_dim + heads.value_dim) / FLOOR_FLOPS_PER_S * 1e6


@dataclass(frozen=True, kw_only=True)
class Inputs:
    query: torch.Tensor
    out: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: KVCache
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    workspace: SplitWorkspace | None  # None: no tile's keys are split
    gpu: GpuLimits


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--cases", default="4x2048,8x512,1x8192,8x256@2048,32x4@1024", help="Batch x new tokens [@ context].")
@click.option("--q-heads", default=16)
@click.option("--kv-heads", default=8)
@click.option("--head-dim", default=128)
@click.option("--block-size", default=16)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16")
@click.option("--block-m", default="16,64,128", help="Rows a tile.")
@click.option("--block-n", default="32,64,128", help="Keys a tile.")
@click.option("--warps", default="4,8")
@click.option("--stages", default="2,3,4")
@click.option("--top", default=8, help="Settings shown a case, best first.")
@click.option("--default-only", is_flag=True, help="Time only the setting `prefill_config` picks.")
@click.option("--split/--no-split", default=True, help="Let several programs share keys where there are few.")
@click.option("--flash/--no-flash", default=True, help="Time flash-attn 2 and 4 too, where they can be imported.")
@click.option("--jobs", default=8, help="Threads that compile settings ahead.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all rows here.")
def main(
    cases: str,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: str,
    block_m: str,
    block_n: str,
    warps: str,
    stages: str,
    top: int,
    default_only: bool,
    split: bool,
    flash: bool,
    jobs: int,
    json_file: Path | None,
) -> None:
    """Time prefill attention over a grid of layouts, and print the best setting of each case first."""
    device = gpu_of_benchmark()
    gpu = GpuLimits.of(device)
    heads = HeadShape(
        num_q_heads=q_heads, num_kv_heads=kv_heads, key_dim=head_dim, value_dim=head_dim, dtype=getattr(torch, dtype)
    )
    click.echo(describe(device))
    click.echo(f"{q_heads}/{kv_heads} heads of {head_dim}, {dtype}, blocks of {block_size}; floor at 750 TFLOP/s")
    rows: list[Row] = []
    for case in map(_parse_case, cases.split(",")):
        default = prefill_config(heads, max_query_len=case.query_len, shared_bytes=gpu.shared_bytes)
        grid = [default]
        if not default_only:
            grid += [
                config
                for m, n, w, s in itertools.product(ints(block_m), ints(block_n), ints(warps), ints(stages))
                if m >= heads.group
                and (config := PrefillConfig(block_m=m, block_n=n, num_warps=w, num_stages=s)) != default
            ]
        inputs = _make_inputs(case, heads, block_size, gpu, device, can_split=split)
        found = _time_case(case, heads, inputs, grid, device, jobs)
        if flash:
            found += _time_flash(case, heads, device)
        found.sort(key=lambda row: row.us if row.us is not None else float("inf"))
        rows += found
        show(found, top)
        if json_file is not None:
            json_file.write_text(
                json.dumps([{**dataclasses.asdict(row), "share": row.share} for row in rows], indent=1)
            )


def _parse_case(text: str) -> Case:
    size, _, context = text.strip().partition("@")
    batch, _, query_len = size.partition("x")
    if not (batch.isdigit() and query_len.isdigit() and (context.isdigit() or not context)):
        raise click.UsageError(f"--cases: {text!r} is not BATCHxTOKENS or BATCHxTOKENS@CONTEXT, such as 8x256@2048.")
    case = Case(batch=int(batch), query_len=int(query_len), context=int(context or query_len))
    if case.context < case.query_len:
        raise click.UsageError(f"--cases: {text!r}: the context includes the new tokens, and is shorter than they.")
    return case


def _make_inputs(
    case: Case, heads: HeadShape, block_size: int, gpu: GpuLimits, device: torch.device, *, can_split: bool
) -> Inputs:
    random = torch.Generator(device=device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=heads.dtype, device=device).normal_(generator=random)

    blocks_each = -(-case.context // block_size)
    num_blocks, num_tokens = case.batch * blocks_each, case.batch * case.query_len
    block_table = torch.randperm(num_blocks, generator=random, device=device).to(torch.int32).view(case.batch, -1)
    positions = torch.arange(case.context - case.query_len, case.context, device=device)
    slots = block_table[:, positions // block_size].long() * block_size + positions % block_size
    return Inputs(
        query=normal(num_tokens, heads.num_q_heads, heads.key_dim),
        out=torch.empty(num_tokens, heads.num_q_heads, heads.value_dim, dtype=heads.dtype, device=device),
        key=normal(num_tokens, heads.num_kv_heads, heads.key_dim),
        value=normal(num_tokens, heads.num_kv_heads, heads.value_dim),
        kv_cache=KVCache(
            normal(num_blocks, block_size, heads.num_kv_heads, heads.key_dim),
            normal(num_blocks, block_size, heads.num_kv_heads, heads.value_dim),
        ),
        query_start_loc=torch.arange(0, num_tokens + 1, case.query_len, dtype=torch.int32, device=device),
        seq_lens=torch.full((case.batch,), case.context, dtype=torch.int32, device=device),
        block_table=block_table,
        slot_mapping=slots.flatten(),
        workspace=allocate_workspace({heads}, case.batch, gpu, device) if can_split else None,
        gpu=gpu,
    )


def _time_case(
    case: Case, heads: HeadShape, inputs: Inputs, grid: list[PrefillConfig], device: torch.device, jobs: int
) -> list[Row]:
    from piecegraph.runner.attention.triton.kernels.kv_write import kv_write_call

    expected = torch.empty(inputs.out.shape, device=device)
    paged_attention(
        _call(inputs, heads)._replace(out=expected), inputs.kv_cache, query_start_loc=inputs.query_start_loc,
        seq_lens=inputs.seq_lens, block_table=inputs.block_table,
    )  # fmt: skip
    torch.cuda.empty_cache()
    compile_ahead([partial(_launch, inputs, heads, config) for config in grid], device, jobs)
    floor_us = case.floor_us(heads)
    rows = []
    for number, config in enumerate(grid):
        us, error, note = None, None, ""
        try:
            inputs.out.fill_(float("nan"))
            _launch(inputs, heads, config)
            error = float((inputs.out.float() - expected).norm() / expected.norm())
            if not error < TOLERANCE[heads.dtype]:
                note = "WRONG"
            us = microseconds([partial(_launch, inputs, heads, config)] * CALLS_A_GRAPH)
        except Exception as failure:  # a setting that does not fit the GPU: report it, go on
            note = short(failure)
        setting = f"m={config.block_m} n={config.block_n} warps={config.num_warps} stages={config.num_stages}"
        setting += "  (default)" if number == 0 else ""
        rows.append(
            Row(case=str(case), kernel="triton", setting=setting, us=us, floor_us=floor_us, error=error, note=note)
        )
    write = kv_write_call(
        inputs.key, inputs.value, kv_cache=inputs.kv_cache, slot_mapping=inputs.slot_mapping, first_row=0,
        num_tokens=inputs.key.shape[0], query=inputs.query,
    )  # fmt: skip
    write_floor_us = 4 * inputs.key.nbytes / 4.25e12 * 1e6  # read and written, key and value
    us = microseconds([write.launch] * CALLS_A_GRAPH)
    rows.append(Row(case=str(case), kernel="kv write", setting="", us=us, floor_us=write_floor_us))
    return rows


def _call(inputs: Inputs, heads: HeadShape) -> AttentionCall:
    return AttentionCall(inputs.query, inputs.key, inputs.value, inputs.out, heads.key_dim**-0.5)


def _launch(inputs: Inputs, heads: HeadShape, config: PrefillConfig) -> None:
    from piecegraph.runner.attention.triton.kernels.prefill import prefill_call

    prefill_call(
        _call(inputs, heads), inputs.kv_cache,
        query_start_loc=inputs.query_start_loc, seq_lens=inputs.seq_lens, block_table=inputs.block_table,
        first_req=0, num_reqs=inputs.seq_lens.shape[0], num_rows=inputs.query.shape[0], config=config,
        workspace=inputs.workspace, num_sms=inputs.gpu.num_sms,
        max_len=0 if inputs.workspace is None else inputs.block_table.shape[1] * inputs.kv_cache.key.shape[1],
    ).launch()  # fmt: skip


def _time_flash(case: Case, heads: HeadShape, device: torch.device) -> list[Row]:
    """Time flash-attn 2 (pages of 256) and 4 (pages of 128)."""
    rows = []
    for name, page, module, call in (
        ("flash-attn 2", 256, "flash_attn", _flash2),
        ("flash-attn 4", 128, "flash_attn.cute", _flash4),
    ):
        try:
            library = importlib.import_module(module)
        except Exception:
            continue
        us, note = None, ""
        try:
            inputs = _make_inputs(case, heads, page, GpuLimits.of(device), device, can_split=False)
            launch = call(library, inputs, case)
            launch()
            us = microseconds([launch] * CALLS_A_GRAPH)
        except Exception as failure:
            note = short(failure)
        setting = f"pages of {page}"
        rows.append(Row(case=str(case), kernel=name, setting=setting, us=us, floor_us=case.floor_us(heads), note=note))
    return rows


def _flash2(library: Any, inputs: Inputs, case: Case) -> Callable[[], None]:
    key_starts = torch.zeros(case.batch + 1, dtype=torch.int32, device=inputs.query.device)
    key_starts[1:] = inputs.seq_lens.cumsum(0)

    def launch() -> None:
        library.flash_attn_varlen_func(
            inputs.query, inputs.kv_cache.key, inputs.kv_cache.value, cu_seqlens_q=inputs.query_start_loc,
            cu_seqlens_k=key_starts, max_seqlen_q=case.query_len, max_seqlen_k=case.context, causal=True,
            block_table=inputs.block_table,
        )  # fmt: skip

    return launch


def _flash4(library: Any, inputs: Inputs, case: Case) -> Callable[[], None]:
    def launch() -> None:
        library.flash_attn_varlen_func(
            inputs.query, inputs.kv_cache.key, inputs.kv_cache.value, cu_seqlens_q=inputs.query_start_loc,
            max_seqlen_q=case.query_len, seqused_k=inputs.seq_lens, page_table=inputs.block_table, causal=True,
        )  # fmt: skip

    return launch


if __name__ == "__main__":
    main()
