from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import click
import pytest

from piecegraph.cache.store.store import Store
from piecegraph.tools.cli import main
from piecegraph.tools.commands.cache import SUBCOMMANDS
from tests.tools.cache.models import save_model


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_a_subcommand_says_of_itself_what_the_list_says(name: str) -> None:
    """The list is written down so that `--help` imports no subcommand; it must not drift."""
    module, line = SUBCOMMANDS[name]
    command = importlib.import_module(module).command
    assert isinstance(command, click.Command)
    assert command.help
    assert command.help.splitlines()[0] == line


def test_a_mistyped_subcommand_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "veryfy"]) == 2
    assert "no command 'veryfy'. Did you mean 'verify'?" in capsys.readouterr().err


def test_no_subcommand_imports_torch(tmp_path: Path) -> None:
    """A subcommand imports no slow module, and none that unpickles; entries are shown and verified without a GPU."""
    root = tmp_path / "cache"
    store = Store.open(root, key_file=tmp_path / "data" / "piecegraph" / "cache.key")
    keys = [save_model(store, eps=eps).plan.key for eps in (0.5, 0.25)]
    program = f"""
import sys
from piecegraph.tools.cli import main

first, second = {keys!r}
codes = [
    main(["cache", *arguments, "--json"])
    for arguments in (
        ["ls"], ["ls", "--pieces"], ["show", first], ["show", first, "--code"], ["why", first], ["diff", first, second],
        ["verify"], ["du"], ["stats"], ["gc"], ["export", "{tmp_path}/file", "--all"], ["path"], ["quarantine", "ls"],
        ["quarantine", "clear", "-y"], ["rm", first, "-y"], ["clear", "-y"], ["import", "{tmp_path}/file"],
    )
]
heavy = {{"torch", "transformers", "numpy", "triton", "rich", "pickle", "depyf"}} & set(sys.modules)
print(set(codes), sorted(heavy), file=sys.stderr)
"""
    environment = {"PIECEGRAPH_CACHE_DIR": str(root), "XDG_DATA_HOME": str(tmp_path / "data")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stderr.splitlines()[-1] == "{0} []"
