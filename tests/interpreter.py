"""Runs a function under Triton's interpreter, in a process of its own: kernels become CPU code there.

Triton reads TRITON_INTERPRET when a kernel is defined, so a process either interprets all or none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def interpreted(function: Callable[[], None]) -> None:
    """Call a module-level `function` there; its exception is this test's failure."""
    code = f"from {function.__module__} import {function.__name__} as check; check()"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
