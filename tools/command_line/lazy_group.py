"""A group of commands whose modules are imported when they are asked for: `--help` imports nothing slow."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """A group that imports a command's module only to run that command or to show its own help."""

    def __init__(self, *args: Any, modules: Mapping[str, tuple[str, str]], **options: Any) -> None:
        """Store `modules`: name -> the module whose `command` it is, and its line in the group's `--help`."""
        super().__init__(*args, **options)
        self.modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        command = importlib.import_module(self.modules[cmd_name][0]).command
        assert isinstance(command, click.Command), f"the module of `{cmd_name}` has no click command named `command`"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.modules:
            raise click.UsageError(f"no command {args[0]!r}.{_nearest(args[0], self.modules)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.modules.items()])


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    from piecegraph.errors import did_you_mean

    return did_you_mean(name, known)
