"""Plans of every family are of use to a second process: what a trace reads can be told, and is there what it was."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from piecegraph.environment import child_environment
from tests.runner.tiny_models import FAMILIES, UNLISTED, random_model, save

ROOT = Path(__file__).resolve().parents[2]
Found = dict[str, dict[str, Any]]


def starts(folders: Sequence[Path], earlier: Found) -> Found:
    """What a new process finds that loads each of `folders`, given what an earlier one found."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.runner.start_families", *map(str, folders)],
        input=json.dumps(earlier),
        env=child_environment({"OMP_NUM_THREADS": "1"}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_second_process_may_load_what_the_first_traced(tmp_path: Path) -> None:
    folders = [save(random_model(made()), tmp_path / name) for name, made in {**FAMILIES, **UNLISTED}.items()]
    first = starts(folders, {})
    second = starts(folders, first)
    for folder in map(str, folders):
        assert first[folder]["key"] == second[folder]["key"] is not None, folder
        assert first[folder]["not_comparable"] == [], folder
        assert second[folder]["changed"] is None, folder
        assert first[folder]["reads"]["facts"], folder
