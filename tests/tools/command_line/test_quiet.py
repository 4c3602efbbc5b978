from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from piecegraph.tools.command_line.options import CONTEXT, LLM_FLAGS, Command, flags


def test_quiet_libraries_show_no_bars_and_no_warnings() -> None:
    """The test runs in a process of its own, because the call changes the process for good."""
    code = (
        "import warnings\n"
        "from piecegraph.tools.command_line.quiet import quiet_libraries\n"
        "quiet_libraries()\n"
        "from transformers.utils import logging\n"
        "list(logging.tqdm(range(3)))\n"
        "logging.get_logger('transformers').warning('advice')\n"
        "warnings.warn('advice')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@click.command(cls=Command, context_settings=CONTEXT)
@click.argument("model", required=False)
@click.argument("prompt", required=False)
@flags(LLM_FLAGS)
@click.option("--quiet", is_flag=True)
def command(quiet: bool, **values: object) -> None:
    click.echo("answer")
    click.echo(f"quiet={quiet}", err=True)


ON_RANKS = ["--distributed-executor-backend", "external_launcher"]


@pytest.mark.parametrize(
    ("rank", "arguments", "stdout", "stderr"),
    [
        ("0", ON_RANKS, "answer\n", "quiet=False\n"),
        ("1", ON_RANKS, "", "quiet=True\n"),
        ("1", [], "answer\n", "quiet=False\n"),  # started by a launcher, and not one of several ranks
    ],
)
def test_only_rank_0_writes(
    rank: str, arguments: list[str], stdout: str, stderr: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    result = CliRunner().invoke(command, ["model", "Hello", *arguments])
    assert (result.stdout, result.stderr) == (stdout, stderr)


@pytest.mark.parametrize("words", [[], ["-"], ["model", "-"]])
def test_ranks_do_not_share_standard_input(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(command, [*words, *ON_RANKS], input="Hello")
    assert result.exit_code == 2
    assert "cannot share standard input: give the prompt as an argument" in result.stderr
