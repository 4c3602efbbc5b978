"""A progress bar over requests, on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from piecegraph.runner.outputs import RequestOutput


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """Yields a function to call with every output. Draws on stderr, and only if that is a terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda output: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    started, num_tokens = time.monotonic(), 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("generate", total=total, rate="")

        def advance(output: RequestOutput) -> None:
            nonlocal num_tokens
            num_tokens += 1
            rate = f"{num_tokens / max(time.monotonic() - started, 1e-9):.1f} tokens/s"
            progress.update(task, advance=int(output.finished), rate=rate)

        yield advance
