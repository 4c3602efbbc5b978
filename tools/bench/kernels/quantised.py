"""Time the linears of a model's layer on a GPU over quantised weights, beside bfloat16's and the bytes that are read.

`python -m piecegraph.tools.bench.kernels.quantised --help` lists the options. Calls of one linear follow each other in
a CUDA graph, over copies of its weight that together exceed the GPU's L2; results are checked against the dequantised
weights before they are timed. Bandwidth is measured in the same run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch
import torch.nn.functional as F

from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.linear_method import PackedWeight, Scheme
from piecegraph.tools.bench.kernels.attention import ints, microseconds, short
from piecegraph.tools.bench.kernels.gpu import describe, gpu_of_benchmark
from piecegraph.tools.bench.kernels.linear import MAX_CALLS, MODELS, POOL_BYTES, Linear, linears_of
from piecegraph.tools.bench.measure.ceilings import measure_ceilings

BOUND: Mapping[str, float] = {"int8-inputs": 2e-2, "fp8-tokens": 6e-2, "fp8-groups": 6e-2}
"""The relative root mean square error above which a result is called wrong, where inputs are rounded."""

SCHEMES: Mapping[str, Scheme] = {
    "int8": Scheme(method="int8"),
    "int8-inputs": Scheme(method="int8-inputs"),
    "int4 in 128": Scheme(method="int4-words", group_size=128, has_offset=True),
    "int4 in 32": Scheme(method="int4-words", group_size=32, has_offset=True),
    "fp8": Scheme(method="fp8"),
    "fp8-tokens": Scheme(method="fp8-tokens"),
    "fp8-groups": Scheme(method="fp8-groups", block_rows=128, group_size=128),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. `us` is None if it failed; `note` says how."""

    model: str
    linear: str
    scheme: str
    num_rows: int
    us: float | None
    bfloat16_us: float
    floor_us: float  # to read the stored weight once
    error: float | None  # relative root mean square, to the dequantised weights in float32
    note: str = ""


def packed_weights(linear: Linear, scheme: Scheme, device: torch.device) -> list[PackedWeight]:
    """Return copies of a random weight as `scheme` stores it, which together exceed an L2."""
    method = METHODS[scheme.method]
    weight = torch.randn(linear.num_weight_rows, linear.size, device=device, dtype=torch.bfloat16) * linear.size**-0.5
    if scheme.method == "fp8-groups":  # read from checkpoints only: weights of ones' size with ones for scales
        empty = method.empty(weight, scheme)
        packed = dataclasses.replace(empty, values=weight.to(torch.float8_e4m3fn), scale=torch.ones_like(empty.scale))
    else:
        plain = Scheme(method="fp8") if scheme.method == "fp8-tokens" else scheme
        packed = METHODS[plain.method].pack(weight, plain)
    copies = min(MAX_CALLS, max(2, -(-POOL_BYTES // packed.values.nbytes)))
    return [packed] + [
        dataclasses.replace(packed, values=packed.values.clone(), scale=packed.scale.clone()) for _ in range(copies - 1)
    ]


def stored_bytes(packed: PackedWeight) -> int:
    """Return the bytes that a linear reads of its weight."""
    return packed.values.nbytes + packed.scale.nbytes


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", "models", type=click.Choice(MODELS), multiple=True, default=MODELS)
@click.option("--linear", "names", multiple=True, help="Only these: qkv, output, gate_up, down, head.")
@click.option("--scheme", "schemes", type=click.Choice(tuple(SCHEMES)), multiple=True, default=tuple(SCHEMES))
@click.option("--rows", default="1,8,32,128,256", help="Comma-separated numbers of rows.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write all rows here.")
def main(
    models: Sequence[str], names: Sequence[str], schemes: Sequence[str], rows: str, json_file: Path | None
) -> None:
    """Time quantised linears; the floor is the stored weight, read once at the measured bandwidth."""
    device = gpu_of_benchmark()
    bandwidth = measure_ceilings(device, torch.bfloat16).read_bytes_per_s
    click.echo(f"{describe(device)}, {bandwidth / 1e12:.2f} TB/s measured")
    click.echo("model       linear   scheme       rows        us    bf16 us   floor us  of floor  error")
    found: list[Row] = []
    for model in models:
        for linear in linears_of(model):
            if linear.name != "head" if not names else linear.name in names:
                found += _time_linear(model, linear, schemes, ints(rows), bandwidth, device)
                if json_file is not None:
                    json_file.write_text(json.dumps([dataclasses.asdict(row) for row in found], indent=1))


def _time_linear(
    model: str, linear: Linear, schemes: Sequence[str], rows: Sequence[int], bandwidth: float, device: torch.device
) -> list[Row]:
    """Time one linear under every scheme, and print a line for each."""
    shape = (linear.num_weight_rows, linear.size)
    copies = max(2, -(-POOL_BYTES // linear.weight_bytes))
    weights = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(copies)]
    inputs = {num_rows: torch.randn(num_rows, linear.size, device=device, dtype=torch.bfloat16) for num_rows in rows}
    plain = {
        num_rows: microseconds([partial(_library, x, weight) for weight in weights]) for num_rows, x in inputs.items()
    }
    del weights
    found: list[Row] = []
    for name in schemes:
        packed = packed_weights(linear, SCHEMES[name], device)
        method = METHODS[SCHEMES[name].method]
        exact = method.unpack(packed[0]).float()
        for num_rows, x in inputs.items():
            us, error, note = None, None, ""
            try:
                wanted = x.float() @ exact.t()
                error = float((method.apply(x, packed[0], None).float() - wanted).norm() / wanted.norm())
                note = "" if error < BOUND.get(SCHEMES[name].method, 1e-2) else "WRONG"
                us = microseconds([partial(_apply, name, x, each) for each in packed])
            except Exception as failure:  # one scheme fails: go on with the others
                note = short(failure)
            row = Row(
                model=model, linear=linear.name, scheme=name, num_rows=num_rows, us=us, bfloat16_us=plain[num_rows],
                floor_us=stored_bytes(packed[0]) / bandwidth * 1e6, error=error, note=note,
            )  # fmt: skip
            found.append(row)
            _show(row)
        del packed, exact
    return found


def _library(x: torch.Tensor, weight: torch.Tensor) -> None:
    F.linear(x, weight)


def _apply(scheme: str, x: torch.Tensor, packed: PackedWeight) -> None:
    METHODS[SCHEMES[scheme].method].apply(x, packed, None)


def _show(row: Row) -> None:
    us = "   failed" if row.us is None else f"{row.us:9.2f}"
    share = "" if row.us is None else f"{row.floor_us / row.us:7.0%}"
    error = "" if row.error is None else f"{row.error:.1e}"
    click.echo(
        f"{row.model:<11} {row.linear:<8} {row.scheme:<12} {row.num_rows:>4} {us} {row.bfloat16_us:10.2f} "
        f"{row.floor_us:10.2f}  {share}  {error} {row.note}"
    )


if __name__ == "__main__":
    main()
