"""The command `piecegraph bench compare`: ours and others' programs in one run, side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from piecegraph.compiler.common.private_folder import scratch_folder
from piecegraph.errors import UsageError
from piecegraph.progress import Phase
from piecegraph.tools.bench.session import bench_arguments, output_flags
from piecegraph.tools.command_line.compile_flags import with_compile_flags
from piecegraph.tools.command_line.options import (
    COMPILE_FLAGS,
    CONTEXT,
    LLM_FLAGS,
    RANGE,
    Command,
    Several,
    batch_sizes,
    flags,
)
from piecegraph.tools.command_line.phases import PhaseDisplay

if TYPE_CHECKING:
    from piecegraph.tools.bench.compare.compare import CompareRow, Figure, Peer, PeerRun

EPILOG = """\b
Examples:
  piecegraph bench compare shape:qwen3-0.6b --peer "vllm=python vllm_bench.py {model}"
  piecegraph bench compare shape:qwen3-0.6b --batch-size 1 32 -- python hf_bench.py {model}
  piecegraph bench compare ./my-model --config peers.toml --repeat 3 --json

A config file may have them: peers = ["vllm=python vllm_bench.py {model}", "hf=python hf_bench.py {model}"]."""


@click.command("compare", cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("model")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--peer",
    "peers",
    cls=Several,
    multiple=True,
    help="NAME=COMMAND of another program; its last line of output is a JSON object of figures. May be repeated.",
)
@batch_sizes(1, 8, 32, 128, 256)
@click.option(
    "--prompt-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Prompt tokens of each of them."
)
@click.option(
    "--decode-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Timed tokens of each."
)
@click.option(
    "--prefill",
    type=(click.IntRange(min=1), click.IntRange(min=1)),
    default=(8, 2048),
    show_default=True,
    metavar="REQUESTS TOKENS",
    help="Requests whose prompts are computed, and tokens of each.",
)
@click.option(
    "--num-requests",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    help="Of the offline workload; 0: none.",
)
@click.option(
    "--offline-tokens", type=RANGE, default="100:1024", show_default=True, help="Of its prompts and of its answers."
)
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Rounds; programs take turns.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=1800, show_default=True, help="Seconds one program may take."
)
@flags(LLM_FLAGS)
@flags(COMPILE_FLAGS)
@output_flags
def compare(
    model: str,
    command: tuple[str, ...],
    peers: tuple[str, ...],
    batch_sizes: tuple[int, ...],
    prompt_tokens: int,
    decode_tokens: int,
    prefill: tuple[int, int],
    num_requests: int,
    offline_tokens: tuple[int, int],
    repeat: int,
    timeout: float,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **values: Any,
) -> int:
    """Measure MODEL by ours and by other programs, one after the other on this machine, with ratios.

    Ours is measured as the others measure themselves, in a process of its own: milliseconds a token (of a long answer
    less one token), prompt tokens a second, nano-vllm's offline workload, seconds to the first token. COMMAND, after
    --, is another program, and so is each --peer; {model} in them is MODEL's folder, and {job} the whole workload as
    JSON. A ratio above 1 says that ours is better. The floor is the best a figure could be at the rates measured in the
    same run. A program that fails is a line with the reason; only if ours does is the exit code 1.

    With --data-parallel-size requests go through the front door to several engines, among which the floor divides them
    evenly.
    """
    arguments = with_compile_flags(bench_arguments(model, values, takes_engines=True), values)
    with PhaseDisplay(quiet=quiet) as display, scratch_folder() as scratch:
        from piecegraph.tools.bench.compare import compare as bench
        from piecegraph.tools.bench.compare.workload import PeerJob
        from piecegraph.tools.bench.measure.machine import machine_facts
        from piecegraph.tools.command_line.records import as_plain
        from piecegraph.tools.command_line.shapes import model_folder

        folder = model_folder(model, scratch)
        job = PeerJob(
            model=folder,
            arguments=arguments,
            batch_sizes=batch_sizes,
            prompt_tokens=prompt_tokens,
            decode_tokens=decode_tokens,
            prefill=prefill,
            offline_requests=num_requests,
            offline_tokens=offline_tokens,
        )
        job_text = json.dumps(as_plain(job))
        program = (sys.executable, "-m", "piecegraph.tools.bench.compare.peer_record", job_text)
        others = [bench.parse_peer(text) for text in peers]
        if command:
            others.append(bench.Peer(name_of(command), command))
        check_names([peer.name for peer in others])
        display(Phase(name="compare"))
        display.spin()
        runs = bench.compare(
            [bench.Peer(bench.OURS, program), *(with_job(peer, folder, job_text) for peer in others)],
            repeats=repeat,
            timeout_s=timeout,
            on_run=lambda number, total, name: display(Phase(name="compare", done=number, total=total, detail=name)),
        )
        display.stop()
        rows = bench.compare_rows(runs)
        if as_json:
            record = {
                "model": model,
                "job": as_plain(job),
                "rows": [as_record(row) for row in rows],
                "agreements": as_plain(bench.agreements(runs)),
                "failures": [{"name": run.name, "reason": run.reason} for run in runs if run.reason],
                "runs": as_plain(runs),
                "environment": machine_facts(),
            }
            click.echo(json.dumps(record))
        else:
            click.echo("\n".join(as_lines(rows, runs)))
    return int(any(run.reason is not None for run in runs if run.name == bench.OURS))


def name_of(command: Sequence[str]) -> str:
    """Return a program's name: that of its script, or its own."""
    return Path(next((word for word in command if word.endswith(".py")), command[0])).stem


def check_names(names: Sequence[str]) -> None:
    """Raise `UsageError` for a name that two programs have, or that is ours."""
    from piecegraph.tools.bench.compare.compare import OURS

    for name in names:
        if name == OURS or names.count(name) > 1:
            raise UsageError(f"two programs are called {name!r}; name each by --peer NAME=COMMAND.")


def with_job(peer: Peer, folder: str, job: str) -> Peer:
    """Return the peer with `{model}` and `{job}` in its command replaced."""
    words = (job if word == "{job}" else word.replace("{model}", folder) for word in peer.command)
    return replace(peer, command=tuple(words))


def as_record(row: CompareRow) -> dict[str, Any]:
    from piecegraph.tools.bench.compare.compare import OURS
    from piecegraph.tools.command_line.records import as_plain

    return {
        **as_plain(row),
        "share_of_floor": row.share_of_floor,
        "ratios": {name: row.ratio(name) for name in row.figures if name != OURS},
    }


def as_lines(rows: Sequence[CompareRow], runs: Sequence[PeerRun]) -> Iterator[str]:
    """Return a line per figure with a column per program and the ratio beside it, then the failures."""
    from piecegraph.tools.bench.compare.compare import OURS, agreements

    others = [name for name in dict.fromkeys(run.name for run in runs) if name != OURS]
    heads = ["figure", OURS, "floor", "of floor", *(head for name in others for head in (name, "ratio"))]
    cells = [
        [
            row.metric,
            cell(row.figures.get(OURS)),
            "-" if row.floor is None else number(row.floor),
            "-" if row.share_of_floor is None else f"{100 * row.share_of_floor:.3g}%",
            *(text for name in others for text in (cell(row.figures.get(name)), ratio_cell(row, name))),
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    for line in (heads, *cells):
        first, *rest = (f"{text:>{width}}" for text, width in zip(line, widths, strict=True))
        yield "  ".join([first.strip().ljust(widths[0]), *rest])
    if others:
        yield f"ratio: how many times better {OURS} is, by medians"
    yield from (agreement.as_line() for agreement in agreements(runs))
    for run in runs:
        if run.reason is not None:
            yield f"{run.name} FAILED after {run.seconds:.1f} s: {run.reason}"


def cell(figure: Figure | None) -> str:
    """Return the median, with the least and the most of several runs."""
    if figure is None:
        return "-"
    if figure.least == figure.most:
        return number(figure.median)
    return f"{number(figure.median)} ({number(figure.least)}-{number(figure.most)})"


def ratio_cell(row: CompareRow, name: str) -> str:
    ratio = row.ratio(name)
    return "-" if ratio is None else f"{ratio:.2f}x"


def number(value: float) -> str:
    """Return a number with four significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
