"""Silence, which only the command line asks for in its own process: of libraries, and of ranks other than 0."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import click

from piecegraph import environment
from piecegraph.progress import OnPhase, Phase
from piecegraph.tools.command_line.phases import PhaseDisplay, Stopwatch


def quiet_libraries() -> None:
    """Turn off progress bars, advice and warnings of torch, transformers and the hub client."""
    import transformers
    from huggingface_hub.utils import disable_progress_bars

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    disable_progress_bars()
    for name in ("torch", "huggingface_hub", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def importing(display: PhaseDisplay, *, debug: bool) -> Iterator[None]:
    """Show a phase while the block imports torch and transformers, and silence them after it unless `debug`."""
    detail = "torch, transformers"
    display(Phase(name="import", detail=detail))
    display.spin()
    watch = Stopwatch()
    yield
    if not debug:
        quiet_libraries()
    display(Phase(name="import", seconds=watch.seconds(), detail=detail))


def quiet_once_imported(on_phase: OnPhase) -> OnPhase:
    """Return an `on_phase` that silences these libraries as soon as `LLM` reports that it has imported them."""

    def silence(phase: Phase) -> None:
        if phase.name == "import" and phase.seconds is not None:
            quiet_libraries()
        on_phase(phase)

    return silence


@contextlib.contextmanager
def only_rank_0_writes(ctx: click.Context) -> Iterator[None]:
    """Write nothing to stdout inside the block, and make the command quiet, on a rank above 0 of a launcher.

    Errors still go to stderr. Raises `click.UsageError` where standard input would be the prompt of every rank.
    """
    if ctx.params.get("distributed_executor_backend") != "external_launcher":
        yield
        return
    if "prompt" in ctx.params and _reads_standard_input(ctx.params):
        raise click.UsageError(
            "ranks of external_launcher cannot share standard input: give the prompt as an argument.", ctx
        )
    if environment.read("RANK") in (None, "0"):
        yield
        return
    if "quiet" in ctx.params:
        ctx.params["quiet"] = True
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _reads_standard_input(params: dict[str, Any]) -> bool:
    """Return whether a command with the arguments MODEL and PROMPT would read its prompt from standard input."""
    words = [word for word in (params.get("model"), params["prompt"]) if word is not None]
    return not words or words[-1] == "-"
