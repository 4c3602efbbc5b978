"""The program of a process that compiles pieces: it reads a job, compiles the piece, writes its artifact and answers.

Its argument is the folder of files that Inductor builds once, which it shares with its parent.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from piecegraph.compiler.workers.process import claim_standard_output, serve
from piecegraph.paused_gc import paused_gc


def main() -> None:
    """Serve jobs until standard input ends."""
    answers = claim_standard_output()

    with paused_gc():
        import torch._inductor.compile_fx
        import torch._inductor.standalone_compile  # noqa: F401  (imported now, while the parent traces)

        from piecegraph.compiler.inductor.artifact import NotSavable, check_savable, save_artifact
        from piecegraph.compiler.inductor.caches import built_once_in
        from piecegraph.compiler.inductor.compile import generated_kernels, standalone_compile
        from piecegraph.compiler.inductor.cpp_libraries import cpp_libraries
        from piecegraph.compiler.rewriting.post_grad import PostGrad, PostGradRun
        from piecegraph.compiler.splitting.piece_format import load_piece
        from piecegraph.compiler.torch_compat.process_settings import apply_process_settings
        from piecegraph.passes.matching.pass_data import NotData
        from piecegraph.passes.ops.all_ops import define_all_ops

        define_all_ops()

    def compile_piece(job: dict[str, Any]) -> dict[str, Any]:
        try:
            begin = time.perf_counter()
            apply_process_settings(job["settings"])
            graph_module, examples = load_piece(Path(job["graph"]).read_text(), job["sizes"])
            check_savable(graph_module)
            kernels = generated_kernels()
            passes = PostGradRun(PostGrad.from_data(job["post_grad"]))
            options = {**job["options"], **passes.options()}
            with built_once_in(Path(sys.argv[1])), cpp_libraries({}) as libraries:
                artifact = standalone_compile(graph_module, examples, options)
            save_artifact(artifact, Path(job["artifact"]))
        except (NotData, NotSavable) as reason:
            return {"needs_parent": str(reason)}
        return {
            "seconds": time.perf_counter() - begin,
            "kernels": generated_kernels() - kernels,
            "post_grad": [outcome.as_data() for outcome in passes.outcomes],
            "libraries": {digest: str(path) for digest, path in libraries.items()},
        }

    serve(answers, compile_piece)


if __name__ == "__main__":
    main()
