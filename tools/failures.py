"""How an exception becomes an exit code and one line on stderr."""

from __future__ import annotations

import sys
import traceback

import click

from piecegraph.errors import OutOfMemory, PiecegraphError

FAILURE = 1
USAGE = 2


def exit_code_of(error: BaseException) -> int:
    """The exit code for an exception: ours say theirs, running out of memory is 4, anything else 1."""
    ours = _ours(error)
    if ours is not None:
        return ours.exit_code
    return OutOfMemory.exit_code if is_out_of_memory(error) else FAILURE


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on any device. torch is asked only if it was imported."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # The CPU allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def show(error: BaseException, *, debug: bool) -> None:
    """One line on stderr for what went wrong; the traceback too in debug."""
    if debug:
        traceback.print_exception(error, file=sys.stderr)
        return
    click.echo(f"error: {message_of(error)}", err=True)


def message_of(error: BaseException) -> str:
    """What happened and what to do, without a traceback."""
    ours = _ours(error)
    if ours is not None:
        return str(ours)
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    if is_out_of_memory(error):
        return (
            f"out of memory ({first_line}). Lower --max-model-len or --gpu-memory-utilization, "
            "or take a smaller --dtype."
        )
    return f"{type(error).__name__}: {first_line} (unexpected; run again with --debug for more)"


def _ours(error: BaseException | None) -> PiecegraphError | None:
    """The error itself, or the one of ours it was raised from: torch wraps what a backend raises."""
    while error is not None and not isinstance(error, PiecegraphError):
        error = error.__cause__
    return error
