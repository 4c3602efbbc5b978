"""The conversion of an exception into an exit code and one line on stderr."""

from __future__ import annotations

import errno
import sys
import traceback

import click

from piecegraph.errors import OutOfMemory, PiecegraphError, is_out_of_memory

FAILURE = 1
USAGE = 2


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an exception: our errors have their own, running out of memory is 4, others are 1."""
    ours = _ours(error)
    if ours is not None:
        return ours.exit_code
    return OutOfMemory.exit_code if is_out_of_memory(error) else FAILURE


def show(error: BaseException, *, debug: bool) -> None:
    """Print one line on stderr for what went wrong, and in debug mode the traceback too."""
    if debug:
        traceback.print_exception(error, file=sys.stderr)
        return
    click.echo(f"error: {message_of(error)}", err=True)


def message_of(error: BaseException) -> str:
    """Return what happened and what to do, without a traceback."""
    ours = _ours(error)
    if ours is not None:
        return str(ours)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"writing failed: {error.strerror}. Free some room, or write elsewhere."
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    if is_out_of_memory(error):
        return (
            f"out of memory ({first_line}). Lower --max-model-len or --gpu-memory-utilization, "
            "or take a smaller --dtype."
        )
    return f"{type(error).__name__}: {first_line} (unexpected; run again with --debug for more)"


def _ours(error: BaseException | None) -> PiecegraphError | None:
    """Return the error itself, or the error of ours that it was raised from: torch wraps what a backend raises."""
    while error is not None and not isinstance(error, PiecegraphError):
        error = error.__cause__
    return error
