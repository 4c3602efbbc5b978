"""The program of a process that compiles our kernels: it reads a kernel, compiles it and answers with its files.

Asked for the driver instead (`DRIVER`), it answers with the module that Triton's driver is made of.

It imports torch, because modules of kernels do, but nothing of Inductor or Dynamo. The first compile of a process takes
a second longer than others, so a small kernel is compiled first, while the parent still imports and traces.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from piecegraph.compiler.workers.process import claim_standard_output, serve
from piecegraph.paused_gc import paused_gc

FIRST: dict[str, Any] = {
    "module": "piecegraph.passes.kernels.common.first_kernel",
    "name": "first_kernel",
    "signature": {"x": "*fp32", "SIZE": "constexpr"},
    "constants": [[[1], 32]],
    "attributes": [],
    "target": ["cuda", 90, 32],
    "options": {"num_warps": 1},
    "fingerprint": None,
}
"""A kernel in the form of `to_kernel_spec`. Nobody launches it, so the GPU that it is compiled for does not matter."""

DRIVER: dict[str, Any] = {"name": "driver", "fingerprint": None}
"""The job that asks for the driver's module instead of a kernel."""


def main() -> None:
    """Serve kernels until standard input ends."""
    answers = claim_standard_output()

    with paused_gc():
        from piecegraph.compiler.triton.compat import KernelFolder, compile_kernel_spec, make_driver, take_torchs_ptxas

    folder = KernelFolder(Path(sys.argv[1]))
    take_torchs_ptxas()
    with contextlib.suppress(Exception):  # the first kernel that is asked for fails too, and its error is reported
        compile_kernel_spec(FIRST, folder)

    def compile_kernel(spec: dict[str, Any]) -> dict[str, Any]:
        known = set(folder.libraries)
        files: dict[str, str] = {}
        if spec == DRIVER:
            make_driver(folder)
        else:
            files = compile_kernel_spec(spec, folder)
        libraries = {path: str(folder.path / path) for path in folder.libraries.keys() - known}
        return {"fingerprint": spec["fingerprint"], "files": files, "libraries": libraries}

    serve(answers, compile_kernel)


if __name__ == "__main__":
    main()
