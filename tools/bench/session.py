"""The common start of every bench and what it records: flags, phases, quiet libraries, the model's folder, the
record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from piecegraph.compiler.common.private_folder import scratch_folder
from piecegraph.errors import ConfigError
from piecegraph.progress import OnPhase, Phase
from piecegraph.tools.command_line.options import LLM_FLAGS, given
from piecegraph.tools.command_line.phases import PhaseDisplay
from piecegraph.tools.command_line.quiet import quiet_once_imported
from piecegraph.tools.command_line.settings import config_option

if TYPE_CHECKING:
    from piecegraph.runner.llm import LLM
    from piecegraph.tools.bench.measure.ceilings import Ceilings
    from piecegraph.tools.bench.measure.engines import Holder

_Command = TypeVar("_Command", bound=Callable[..., Any])


def output_flags(command: _Command) -> _Command:
    """Add the options `--json`, `--quiet`, `--debug` and `--config` to a bench."""
    command = config_option(command)
    command = click.option("--debug", is_flag=True, help="Show tracebacks and what the libraries say.")(command)
    command = click.option("--quiet", is_flag=True, help="Print no phases.")(command)
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done.")(command)


def bench_arguments(model: str, values: dict[str, Any], *, takes_engines: bool = False) -> dict[str, Any]:
    """Return the arguments of `LLM` that were given; those of a `shape:` ask for no weights to read.

    Raises `ConfigError` for several engines unless the bench `takes_engines`.
    """
    arguments = given(LLM_FLAGS, values)
    if arguments.get("data_parallel_size", 1) > 1 and not takes_engines:
        raise ConfigError(
            "this benchmark reads the counters, graphs and model of one engine, in its process; leave "
            "data_parallel_size out, or use `piecegraph bench throughput`, `bench latency` or `bench compare`."
        )
    if model.startswith("shape:"):
        arguments.setdefault("load_format", "dummy")
    return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchStart:
    """The inputs of a bench's `LLM`, collected before torch and transformers are imported: making it imports them."""

    display: PhaseDisplay
    on_phase: OnPhase  # the display; keeps libraries quiet, unless their voices were asked for
    folder: str  # the model's, or the model as it was named
    scratch: Path  # where that of a `shape:` lies and others can be made; removed at the end


@contextmanager
def bench_start(model: str, *, quiet: bool, debug: bool) -> Iterator[BenchStart]:
    """Begin the display, and make the folder of a `shape:`, which is removed at the end.

    Raises `ModelError` for an unknown shape.
    """
    with PhaseDisplay(quiet=quiet) as display, scratch_folder() as scratch:
        display(Phase(name="import", detail="torch, transformers"))
        display.spin()
        from piecegraph.tools.command_line.shapes import model_folder

        on_phase = display if debug else quiet_once_imported(display)
        folder = model_folder(model, scratch)
        yield BenchStart(display=display, on_phase=on_phase, folder=folder, scratch=scratch)


def about(llm: LLM, display: PhaseDisplay) -> dict[str, Any]:
    """Return what a record says of the measured model and of the machine; several engines are alike in it."""
    from piecegraph.tools.bench.measure.engines import from_engines
    from piecegraph.tools.bench.measure.machine import machine_facts
    from piecegraph.tools.command_line.records import as_plain

    return {
        "phases": display.seconds,
        "report": as_plain(llm.report),
        "graphs": from_engines(llm, _graphs)[0],
        "notes": list(llm.notes),
        "environment": machine_facts(),
    }


def _graphs(holder: Holder) -> dict[str, Any]:
    graphs = holder.runner.graphs
    return {**graphs.summary(), "device_bytes": graphs.device_bytes}


def ceilings_line(ceilings: Ceilings) -> str:
    """Return the rates in words, with units that suit a GPU or a CPU."""
    if ceilings.read_bytes_per_s < 1e11:
        return f"ceilings: {ceilings.read_bytes_per_s / 1e9:.1f} GB/s read, {ceilings.flops_per_s / 1e9:.0f} GFLOP/s"
    return f"ceilings: {ceilings.read_bytes_per_s / 1e12:.2f} TB/s read, {ceilings.flops_per_s / 1e12:.0f} TFLOP/s"
