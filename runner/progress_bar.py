"""A progress bar over requests, on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from piecegraph.runner.outputs import RequestOutput

if TYPE_CHECKING:
    from piecegraph.runner.engine import Engine


@contextmanager
def progress_bar(total: int, engine: Engine, *, shown: bool) -> Iterator[Callable[[Sequence[RequestOutput]], None]]:
    """Yields a function to call after every step of `engine`, with its outputs. Draws on stderr, and only if that
    is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda outputs: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    started, tokens_before = time.monotonic(), engine.num_output_tokens
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("generate", total=total, rate="")

        def advance(outputs: Sequence[RequestOutput]) -> None:
            num_tokens = engine.num_output_tokens - tokens_before
            rate = f"{num_tokens / max(time.monotonic() - started, 1e-9):.1f} tokens/s"
            progress.update(task, advance=sum(output.finished for output in outputs), rate=rate)

        yield advance
