"""Cases that run in Triton's interpreter, in a process of their own: it is chosen when Triton is imported.

A test module has `CASES`, functions by name, and asks `run_interpreted(__name__)` what became of them.
The interpreter takes about 20 ms a program, and is silently wrong in bfloat16.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[5]
_MARK = "outcomes: "


def run_interpreted(module: str) -> dict[str, str]:
    """Return the outcome of each of the module's `CASES` by name: an empty text, or a traceback."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.runner.attention.triton.kernels.interpreted", module],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    last = child.stdout.splitlines()[-1]
    assert last.startswith(_MARK), child.stdout
    outcomes: dict[str, str] = json.loads(last.removeprefix(_MARK))
    return outcomes


def outcome(case: Callable[[], None]) -> str:
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    cases: dict[str, Callable[[], None]] = importlib.import_module(sys.argv[1]).CASES
    sys.stdout.write(_MARK + json.dumps({name: outcome(case) for name, case in cases.items()}) + "\n")
