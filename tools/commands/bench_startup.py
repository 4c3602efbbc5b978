"""The command `piecegraph bench startup`: from the start of a process to its first token, every phase by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from piecegraph.compiler.common.private_folder import scratch_folder
from piecegraph.errors import did_you_mean
from piecegraph.progress import Phase
from piecegraph.runner.common.engine_config import STARTS
from piecegraph.tools.bench.session import bench_arguments, output_flags
from piecegraph.tools.command_line.compile_flags import with_compile_flags
from piecegraph.tools.command_line.options import COMPILE_FLAGS, CONTEXT, LLM_FLAGS, Command, flags
from piecegraph.tools.command_line.phases import PhaseDisplay

if TYPE_CHECKING:
    from piecegraph.tools.bench.startup.startup import Spread, Start, StartupRow

EPILOG = """\b
Examples:
  piecegraph bench startup
  piecegraph bench startup --start fast,full --cold-only
  piecegraph bench startup shape:qwen3-0.6b --compiler inductor eager --repeat 3
  piecegraph bench startup shape:qwen3-0.6b:2 --cold-only --json"""

OTHER_FLAGS = tuple(flag for flag in LLM_FLAGS if flag.name not in ("compiler", "start"))


class _Modes(click.ParamType[Any]):
    """Modes of a start, separated by commas."""

    name = "fast|full"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        words = value.split(",") if isinstance(value, str) else list(map(str, value))
        for word in words:
            if word not in STARTS:
                self.fail(f"there is no start {word!r}.{did_you_mean(word, STARTS)}", param, ctx)
        return tuple(dict.fromkeys(words))


MODES = _Modes()
COMPILER = next(flag for flag in LLM_FLAGS if flag.name == "compiler")


@click.command("startup", cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("model", required=False)
@click.option(
    COMPILER.spelling,
    "compilers",
    type=COMPILER.type,
    multiple=True,
    default=("inductor",),
    show_default=True,
    envvar=COMPILER.variable,
    help="What compiles a piece; several are shown side by side.",
)
@click.option(
    "--start",
    "modes",
    type=MODES,
    default="full",
    show_default=True,
    envvar="PIECEGRAPH_START",
    help="How a start goes: full, fast, or fast,full side by side.",
)
@click.option("--no-tokenizer", is_flag=True, help="Start without a tokenizer, as other benches do.")
@click.option("--cold-only", is_flag=True, help="No second start over what the first one left in the caches.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Times all of it is done.")
@flags(OTHER_FLAGS)
@flags(COMPILE_FLAGS)
@output_flags
def startup(
    model: str | None,
    compilers: tuple[str, ...],
    modes: tuple[str, ...],
    no_tokenizer: bool,
    cold_only: bool,
    repeat: int,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **values: Any,
) -> None:
    """Measure seconds from the start of a process to its first token, cold and warm, every phase by name.

    MODEL is a folder, a .gguf file, a hub id, or shape:NAME for random weights in a published shape; without it the
    embedded model. Each start is a process of its own. A cold one has empty caches, ours, Inductor's and Triton's; the
    warm one after it finds what that left. Files may be in the operating system's memory already. Each moment counts
    for the innermost phase, imports wherever they happen; time outside all phases is unnamed. Work of other threads is
    in none of these sums.
    """
    arguments = with_compile_flags(bench_arguments(model or "", {**values, "compiler": None, "start": None}), values)
    with PhaseDisplay(quiet=quiet) as display, scratch_folder() as scratch:
        display(Phase(name="start"))
        display.spin()
        from piecegraph.tools.bench.measure.machine import machine_facts
        from piecegraph.tools.bench.startup.startup import measure_startup
        from piecegraph.tools.command_line.shapes import PREFIX, model_folder

        if model is None:
            from piecegraph.runner.models.embedded_model import embedded_model_dir

            folder = str(embedded_model_dir(display))  # converted once in a life, so no part of a start
        else:
            folder = model_folder(model, scratch / "model")
        if no_tokenizer or (model or "").startswith(PREFIX):  # a shape has none
            arguments["skip_tokenizer_init"] = True
        rows = measure_startup(
            folder,
            arguments,
            tuple(dict.fromkeys(compilers)),
            scratch=scratch / "caches",
            modes=modes,
            is_warm_too=not cold_only,
            repeats=repeat,
            on_start=lambda number, total, name: display(Phase(name="start", done=number, total=total, detail=name)),
        )
        display.stop()
        if as_json:
            record = {
                "model": model or folder,
                "arguments": arguments,
                "repeat": repeat,
                "rows": [row.as_record() for row in rows],
                "environment": machine_facts(),
            }
            click.echo(json.dumps(record, default=str))
            return
        click.echo("\n".join(as_lines(rows)))


def as_lines(rows: Sequence[StartupRow]) -> Iterator[str]:
    """Return a line per phase with a column per kind of start, then each piece's compile."""
    phases = [row.phases for row in rows]
    names = list(dict.fromkeys(name for each in phases for name in each))
    width = max(len("of the first column"), *map(len, names))
    columns = [max(len(row.name), len("000.00 (000.00-000.00)")) for row in rows]

    def line(name: str, cells: Sequence[str]) -> str:
        return f"{name:<{width}}  " + "  ".join(f"{cell:>{size}}" for cell, size in zip(cells, columns, strict=True))

    yield line("seconds", [row.name for row in rows])
    for name in names:
        yield line(name.replace("_", " "), [cell(each.get(name)) for each in phases])
    yield line("unnamed", [cell(row.unnamed) for row in rows])
    for name in dict.fromkeys(
        name for row in rows for name, spread in row.unnamed_after.items() if spread.most >= 0.05
    ):
        yield line(f"- after {name.replace('_', ' ')}", [cell(row.unnamed_after.get(name)) for row in rows])
    yield line("to the first token", [cell(row.seconds) for row in rows])
    if any(start.mode == "fast" for row in rows for start in row.starts):
        yield line("to full speed", [cell(row.full_speed_seconds) for row in rows])
    yield line("of that ours", [cell(row.own_seconds) for row in rows])
    yield line("named", [f"{row.named_share:.1%}" for row in rows])
    yield line("of the first column", [f"{row.of_first:.2f}x" for row in rows])
    for name in dict.fromkeys(name for row in rows for name in row.beside):
        yield line(f"beside: {name.replace('_', ' ')}", [cell(row.beside.get(name)) for row in rows])
    yield "ours: beyond the interpreter, importing torch and transformers, and reading weights"
    for row in rows:
        for text in piece_lines(row.starts[0]):
            yield f"{row.name}: {text}"
    for note in dict.fromkeys(note for row in rows for note in row.starts[0].notes):
        yield f"note: {note}"


def cell(spread: Spread | None) -> str:
    """Return a text like `1.20`, with least and most if there are several starts; `-` for a phase that did not run."""
    if spread is None:
        return "-"
    if spread.least == spread.most:
        return f"{spread.median:.2f}"
    return f"{spread.median:.2f} ({spread.least:.2f}-{spread.most:.2f})"


def piece_lines(start: Start) -> Iterator[str]:
    """Return what the cache had, or what each unique piece took; pieces may compile side by side."""
    report: Mapping[str, Any] = start.report
    cache: Mapping[str, Any] = report.get("cache", {})
    if cache.get("state") == "hit":
        yield f"cache hit, {cache['loaded_pieces']} pieces loaded in {cache['load_seconds']:.2f} s"
        return
    if cache.get("reason"):
        yield f"cache {cache['state']}: {cache['reason']}"
    for row in report.get("unique_pieces", ()):
        shared = f"shared by {row['shared_by']}" if row["shared_by"] > 1 else "of one place"
        yield f"piece {row['index']} ({shared}) compiled in {row['compile_seconds']:.2f} s"
    for row in report.get("static_pieces", ()):
        yield (
            f"piece {row['unique']} at size {row['size']} compiled in {row['compile_seconds']:.2f} s, "
            f"tuned in {row['tune_seconds']:.2f} s"
        )
