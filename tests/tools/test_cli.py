from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from piecegraph import __version__
from piecegraph.tools.cli import COMMANDS, main, piecegraph
from piecegraph.tools.command_line.options import COMPILE_FLAGS, LLM_FLAGS, SAMPLING_FLAGS


def test_help_lists_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)
    assert "130 interrupted" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"piecegraph {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_of_itself_what_the_list_says(name: str) -> None:
    """The list is written down so that `--help` imports no command; it must not drift."""
    module, line = COMMANDS[name]
    command = importlib.import_module(module).command
    assert isinstance(command, click.Command)
    assert command.help
    if name != "run":  # its first line names its arguments
        assert command.help.splitlines()[0] == line


def options_of(command: click.Command) -> Iterator[click.Option]:
    """Yield the options of a command and of its subcommands."""
    context = click.Context(command)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            yield from options_of(subcommand)
    yield from (each for each in command.params if isinstance(each, click.Option) and not each.hidden)


def test_every_option_is_in_a_page() -> None:
    """By one of its spellings, or, if it sets an argument of the library, as that argument in `backticks`."""
    root = Path(__file__).parents[2]
    pages = "\n".join(page.read_text(encoding="utf-8") for page in [root / "README.md", *(root / "docs").glob("*.md")])
    spelled = set(re.findall(r"(?<![\w-])--?[\w-]+", pages))
    arguments = {flag.name for flag in (*LLM_FLAGS, *SAMPLING_FLAGS, *COMPILE_FLAGS)}
    described = {name for name in re.findall(r"(?<=`)[a-z_]\w*", pages) if name in arguments}
    missing = {
        option.opts[0]
        for option in options_of(piecegraph)
        if spelled.isdisjoint([*option.opts, *option.secondary_opts]) and option.name not in described
    }
    assert missing == {"--version"}, "describe it in the page where a user would look for it"


def test_a_mistyped_command_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rum"]) == 2
    assert "no command 'rum'. Did you mean 'run'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("--max-new-tokens", "--max-tokens"),
        ("--temp", "--temperature"),
        ("--n-predict", "--max-tokens"),
        ("--max_tokens", "--max-tokens"),
        ("--temperatur", "--temperature"),
        ("--torch-dtype", "--dtype"),
        ("--model", "the argument MODEL"),
    ],
)
def test_a_mistyped_option_is_refused_with_the_nearest(
    given: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "Where?", given, "1"]) == 2
    err = capsys.readouterr().err
    assert f"No such option '{given}'." in err
    assert f"Did you mean {nearest}" in err.replace("'", "")


def test_help_imports_nothing_heavy() -> None:
    """The test checks imports, which make --help slow; seconds are for benchmarks."""
    program = (
        "import sys\n"
        "from piecegraph.tools.cli import main\n"
        "code = main(['run', '--help'])\n"
        "heavy = ('torch', 'transformers', 'tokenizers', 'safetensors', 'numpy', 'rich', 'jinja2', 'triton')\n"
        "print(code, [name for name in heavy if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "--max-tokens" in done.stdout
    assert done.stderr.strip() == "0 []"


def test_a_reader_that_has_seen_enough_ends_a_command_quietly() -> None:
    """A pipe into `head` causes no traceback, and no complaint of Python's at the end."""
    program = "import sys; from piecegraph.tools.cli import main; sys.exit(main(['--help']))"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


def test_an_interrupted_command_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.setattr("piecegraph.tools.commands.env.machine_facts", interrupted)
    assert main(["env"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"
