"""Runs functions under Triton's interpreter, in a process of their own: kernels become CPU code there.

Triton reads TRITON_INTERPRET when a kernel is defined, so a process either interprets all or none. One process imports
torch and Triton once and is forked for each function, which finds nothing of the functions before it.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def interpreted(function: Callable[[], None]) -> None:
    """Call a module-level `function` there; its exception is this test's failure."""
    _ask(function.__module__, function.__name__)


def interpreted_case(module: str, case: str) -> None:
    """Call one of the functions that the module has by name in `CASES` there, which takes about 20 ms a program."""
    _ask(module, "CASES", case)


def _ask(*what: str) -> None:
    process = _process()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        _process.cache_clear()
    assert line, "the process that interprets ended; what it wrote to standard error says why"
    failure: str = json.loads(line)
    assert not failure, failure[-4000:]


@functools.cache
def _process() -> subprocess.Popen[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.interpreter"]
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def end() -> None:
        process.communicate()

    atexit.register(end)
    return process


def _answer(module: str, name: str, case: str = "") -> str:
    """Return how the function failed in a fork of this process; nothing if it did not."""
    try:
        importlib.import_module(module)
    except Exception:
        return traceback.format_exc()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(2, 1)  # standard output is for answers
        try:
            found = getattr(importlib.import_module(module), name)
            (found[case] if case else found)()
            os._exit(0)
        except BaseException:
            with os.fdopen(writing, "w") as told:
                told.write(traceback.format_exc())
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as found:
        text = found.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return "" if status == 0 else text or f"{name} ended with status {status}"


IMPORTED_LATE = ("torch.distributed.tensor", "triton.language", "triton.runtime.interpreter")
"""The modules that `torch.testing.assert_close` and the first launch of a kernel import, half a second in each fork."""


if __name__ == "__main__":
    for late in IMPORTED_LATE:
        importlib.import_module(late)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_answer(*json.loads(line))) + "\n")
        sys.stdout.flush()
