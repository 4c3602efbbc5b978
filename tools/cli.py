"""The command line, `piecegraph`: its commands, and how a run of one ends.

A command is one file and one line in `COMMANDS`; its module is imported when it is asked for, so that `--help` imports
no torch. Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

import click

from piecegraph import __version__
from piecegraph.tools.command_line.failures import USAGE, exit_code_of, show
from piecegraph.tools.command_line.interrupts import INTERRUPTED, remembered_interrupts
from piecegraph.tools.command_line.lazy_group import LazyGroup

COMMANDS = {
    "run": ("piecegraph.tools.commands.run", "Stream a model's answer to a prompt."),
    "serve": ("piecegraph.tools.serve.commands.serve", "Serve a model through the OpenAI API."),
    "chat": ("piecegraph.tools.serve.commands.chat", "Talk with a model."),
    "compile": ("piecegraph.tools.commands.compile", "Fill the cache with a model, from its config alone."),
    "explain": (
        "piecegraph.tools.commands.explain",
        "Show pieces, dispatch table, and why anything is slower than asked for.",
    ),
    "bench": (
        "piecegraph.tools.commands.bench",
        "Measure decode steps, workloads, starts, passes, drafts and other programs.",
    ),
    "cache": ("piecegraph.tools.commands.cache", "List, explain, verify and carry the cache of compiled models."),
    "env": ("piecegraph.tools.commands.env", "Show versions, devices, compilers and folders for a bug report."),
}
"""Name -> the module whose `command` it is, and its line in `piecegraph --help`."""

EXIT_CODES = """\b
Exit codes: 0 ok, 1 failure, 2 usage, 3 bad model or config, 4 out of memory,
5 compile or capture failed, 6 verification failed, 130 interrupted."""


@click.group(
    cls=LazyGroup, modules=COMMANDS, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, message="piecegraph %(version)s")
def piecegraph() -> None:
    """Cut a model at attention, compile each unique piece once, replay the pieces."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Shows one line for an error, a traceback only with --debug."""
    arguments = list(sys.argv[1:] if args is None else args)
    with remembered_interrupts() as interrupts:
        try:
            code = piecegraph.main(arguments, prog_name="piecegraph", standalone_mode=False)
        except click.ClickException as error:
            error.show()
            return USAGE if isinstance(error, click.UsageError) else error.exit_code
        except (click.Abort, KeyboardInterrupt):
            return _end_interrupted()
        except Exception as error:
            if interrupts.was_asked:  # an interrupt in the middle of somebody's code may come out as anything
                return _end_interrupted()
            show(error, debug="--debug" in arguments)
            return exit_code_of(error)
        if interrupts.was_asked:  # lost, and nobody asked again before the end
            return _end_interrupted()
        return code if isinstance(code, int) else 0


def _end_interrupted() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a further Ctrl-C shall not end in a traceback of the shutdown
    click.echo("interrupted", err=True)
    return INTERRUPTED
