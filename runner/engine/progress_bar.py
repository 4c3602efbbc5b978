"""A progress bar over requests: a built-in one, on terminals only, or one that the caller makes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from piecegraph.runner.common.outputs import RequestOutput

if TYPE_CHECKING:
    from piecegraph.runner.engine.engine import Engine

Advance = Callable[[Sequence[RequestOutput]], None]
"""A function to call after every step with the step's outputs."""


@contextmanager
def progress_bar(total: int, engine: Engine, *, shown: bool | Callable[..., Any]) -> Iterator[Advance]:
    """Yield a function to call after every step of `engine` with the step's outputs.

    `shown`: False draws nothing; True draws on stderr if stderr is a terminal; a callable is called like `tqdm.tqdm`,
    and the bar that it returns is updated by one for each finished request, and closed.
    """
    if callable(shown):
        bar = shown(total=total, desc="Processed prompts", dynamic_ncols=True)
        try:
            yield lambda outputs: _update(bar, outputs)
        finally:
            bar.close()
        return
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


def _update(bar: Any, outputs: Sequence[RequestOutput]) -> None:
    finished = sum(output.finished for output in outputs)
    if finished:
        bar.update(finished)
