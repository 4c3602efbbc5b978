"""What a process that compiles kernels of ours runs: read a kernel a line, compile it, answer with its files a line.
Or, asked for the driver, with the module that Triton's driver is made of.

It imports torch, since modules of kernels do, but nothing of Inductor or Dynamo. The first compile of a process takes a
second longer than others: that is done before one is asked for, while who asks imports and traces.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

FIRST: dict[str, Any] = {
    "module": "piecegraph.passes.kernels.first_kernel",
    "name": "first_kernel",
    "signature": {"x": "*fp32", "SIZE": "constexpr"},
    "constants": [[[1], 32]],
    "attributes": [],
    "target": ["cuda", 90, 32],
    "options": {"num_warps": 1},
    "fingerprint": None,
}
"""As `triton_compat.said_of` says it: nobody launches it, for whatever GPU it is."""

DRIVER: dict[str, Any] = {"name": "driver", "fingerprint": None}
"""In a kernel's place."""


def main() -> None:
    """Serve kernels until standard input ends. Standard output carries answers only: whatever a library prints goes
    to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    from piecegraph.compiler.triton_compat import KernelFolder, compile_said, make_driver, take_torchs_ptxas

    folder = KernelFolder(Path(sys.argv[1]))
    take_torchs_ptxas()
    with contextlib.suppress(Exception):  # what is wrong is wrong with the first kernel too, and is said there
        compile_said(FIRST, folder)
    for line in sys.stdin:
        try:
            said, known = json.loads(line), set(folder.libraries)
            answer: dict[str, Any] = {"fingerprint": said["fingerprint"], "files": {}}
            if said == DRIVER:
                make_driver(folder)
            else:
                answer["files"] = compile_said(said, folder)
            answer["libraries"] = {path: str(folder.path / path) for path in folder.libraries.keys() - known}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
