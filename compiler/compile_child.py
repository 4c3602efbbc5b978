"""What a compile process runs: read a job a line, compile the piece, write its artifact, answer a line.

Its argument is the folder of what Inductor builds once, which it shares with the process that started it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve jobs until standard input ends. Standard output carries answers only: whatever a library
    prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    import torch._inductor.compile_fx
    import torch._inductor.standalone_compile  # noqa: F401  (imported now, while the parent traces)

    from piecegraph.compiler.cpp_libraries import cpp_libraries
    from piecegraph.compiler.inductor_caches import built_once_in
    from piecegraph.compiler.inductor_compile import generated_kernels, standalone_compile
    from piecegraph.compiler.piece_format import load_piece
    from piecegraph.compiler.post_grad import PostGrad, PostGradRun
    from piecegraph.compiler.process_settings import apply_process_settings
    from piecegraph.passes.ops.all_ops import define_all_ops
    from piecegraph.passes.pass_data import NotData

    define_all_ops()
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        try:
            begin = time.perf_counter()
            apply_process_settings(job["settings"])
            graph_module, examples = load_piece(Path(job["graph"]).read_text(), job["sizes"])
            kernels = generated_kernels()
            passes = PostGradRun(PostGrad.from_data(job["post_grad"]))
            options = {**job["options"], **passes.options()}
            with built_once_in(Path(sys.argv[1])), cpp_libraries({}) as libraries:
                artifact = standalone_compile(graph_module, examples, options)
            artifact.save(path=job["artifact"], format="binary")
            answer: dict[str, Any] = {
                "seconds": time.perf_counter() - begin,
                "kernels": generated_kernels() - kernels,
                "post_grad": [outcome.as_data() for outcome in passes.outcomes],
                "libraries": {digest: str(path) for digest, path in libraries.items()},
            }
        except NotData as reason:
            answer = {"only_there": str(reason)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
