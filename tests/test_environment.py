"""What a process of ours gives to a Python process that it starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from piecegraph import environment


def test_a_child_has_our_import_path_and_the_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_ONE", "kept")
    variables = environment.child_environment({"PIECEGRAPH_CACHE_DIR": "elsewhere"})
    assert variables["PIECEGRAPH_ONE"] == "kept"
    code = "import os, piecegraph; print(piecegraph.__file__, os.environ['PIECEGRAPH_CACHE_DIR'])"
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    import piecegraph

    assert done.stdout.split() == [piecegraph.__file__, "elsewhere"]
