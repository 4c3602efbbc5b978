"""One start of a model in a process of its own; prints what came of it as JSON.

Arguments: a JSON object with `model` ("decoder" or a folder for `LLM`), `forbid` (compile nothing, start no process)
and `options` of the compile, or of `LLM`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # sets TORCHINDUCTOR_CACHE_DIR to where it would be anyway

import piecegraph as pg


def main() -> None:
    asked = json.loads(sys.argv[1])
    before = dict(os.environ)
    if asked["forbid"]:
        forbid_compiling()
    compiled, result = decoder(asked["options"]) if asked["model"] == "decoder" else llm(asked)
    report = compiled.report()
    sys.stdout.write(
        json.dumps(
            {
                "result": result,
                "cache": report.as_dict()["cache"],
                "matches": {row.name: row.matches for row in report.passes},
                "pieces": [row.key for row in report.unique_pieces],
                "changed_environment": sorted(
                    name for name in {*before, *os.environ} - TORCHS_OWN if before.get(name) != os.environ.get(name)
                ),
            }
        )
    )


TORCHS_OWN = {"_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}
"""An address that torch's generated code reads, good for this process alone."""


def forbid_compiling() -> None:
    """Dynamo, Inductor, and every process but this one raise. On a GPU Triton asks two programs what they are."""
    from piecegraph.compiler.building import inductor_pieces as inductor
    from piecegraph.compiler.tracing import trace

    def forbidden(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError(f"a warm start compiles nothing and starts no process: {args[:1]}")

    class OnlyAsked(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, args: Any, *more: Any, **kwargs: Any) -> None:
            asked = Path(args[0]).name, *args[1:2]
            if asked not in (("ptxas", "--version"), ("ldconfig", "-p"), ("file", "-b")):
                forbidden(args)
            super().__init__(args, *more, **kwargs)

    for owner, names in (
        (trace, ("dynamo_graph",)),
        (inductor, ("standalone_compile",)),
        (torch._dynamo, ("optimize",)),
        (os, ("fork", "posix_spawn", "system")),
    ):
        for name in names:
            setattr(owner, name, forbidden)
    setattr(subprocess, "Popen", OnlyAsked)  # noqa: B010


def decoder(options: dict[str, Any]) -> tuple[pg.CompiledModel, str]:
    from tests.compiler.toy import DIMS, SPLIT_OPS, Decoder, batch

    config = pg.CompileConfig(split_ops=SPLIT_OPS, **options)
    compiled = pg.compile(Decoder(2), config, dynamic_dims=DIMS, example_inputs=batch(9, 2))
    return compiled, digest([compiled(*batch(rows, 2, seed=rows)) for rows in (1, 4, 33)])


def llm(asked: dict[str, Any]) -> tuple[pg.CompiledModel, str]:
    with pg.LLM(asked["model"], dtype="float32", max_num_seqs=4, num_kv_blocks=32, **asked["options"]) as llm:
        wanted = pg.SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
        outputs = llm.generate(["one", "another"], wanted, use_tqdm=False)
        found = [(each.outputs[0].token_ids, repr(each.outputs[0].logprobs)) for each in outputs]
        compiled = llm.compiled
        report = compiled.report()
        compiled.report = lambda: report  # type: ignore[method-assign]  # it is closed below
    return compiled, repr(found)


def digest(tensors: Sequence[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


if __name__ == "__main__":
    main()
