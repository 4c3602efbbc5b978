"""Questions to the user before something is removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from piecegraph.errors import UsageError


def yes_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `-y`, which the command's function receives as `yes`."""
    return click.option("-y", "--yes", is_flag=True, help="Do not ask.")(function)


def confirmed(question: str) -> bool:
    """Return the user's answer; a no is reported on stderr. Raises `UsageError` where nobody can answer."""
    try:
        answer = click.confirm(question, err=True)
    except click.Abort as error:
        if isinstance(error.__context__, EOFError):
            click.echo(err=True)
            raise UsageError(f"{question} Nobody is here to answer; say yes with -y.") from None
        raise
    if not answer:
        click.echo("nothing was removed", err=True)
    return answer
