"""The command line, `piecegraph`: which commands there are, and how a run of one ends.

A command is one file and one line in `COMMANDS`; its module is imported when it is asked for, so that
`--help` imports no torch. Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence

import click

from piecegraph import __version__
from piecegraph.tools.failures import USAGE, exit_code_of, show
from piecegraph.tools.interrupts import INTERRUPTED, remembered_interrupts

COMMANDS = {
    "run": ("piecegraph.tools.run_command", "Stream a model's answer to a prompt."),
    "explain": (
        "piecegraph.tools.explain_command",
        "Pieces, dispatch table, and why anything is slower than asked for.",
    ),
    "bench": ("piecegraph.tools.bench_command", "Measure: milliseconds per decode step, next to the roofline."),
    "env": ("piecegraph.tools.env_command", "Versions, devices, compilers and folders a bug report needs."),
}
"""Name -> the module whose `command` it is, and its line in `piecegraph --help`."""

EXIT_CODES = """\b
Exit codes: 0 ok, 1 failure, 2 usage, 3 bad model or config, 4 out of memory,
5 compile or capture failed, 6 verification failed, 130 interrupted."""


class LazyGroup(click.Group):
    """A group that imports a command's module only to run that command or to show its own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command), f"the module of `{cmd_name}` has no click command named `command`"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise click.UsageError(f"no command {args[0]!r}.{_nearest(args[0])}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def _nearest(name: str) -> str:
    from piecegraph.errors import did_you_mean

    return did_you_mean(name, COMMANDS)


@click.group(cls=LazyGroup, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="piecegraph %(version)s")
def piecegraph() -> None:
    """Cut a model at attention, compile each unique piece once, replay the pieces."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. Shows one line for an error, a traceback only with --debug."""
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
