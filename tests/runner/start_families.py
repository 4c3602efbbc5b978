"""Load each folder given with `LLM`, in a process of its own; print what its plan would depend on, as JSON.

Standard input holds what an earlier process printed, or `{}`. A folder that it has is not traced again. Each start ends
where its graph would be compiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

from torch import nn

from piecegraph import LLM, CompileConfig
from piecegraph.compiler.building import cold_start
from piecegraph.compiler.plans.plan_format import reads_as_data, reads_of_data
from piecegraph.compiler.plans.plan_store import PlanStore
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.tracing.dynamic_dims import DynamicDims
from piecegraph.compiler.tracing.signature import ExampleCall
from piecegraph.compiler.tracing.trace import Traced, trace
from piecegraph.compiler.tracing.traced_reads import find_changed_read


class Seen(Exception):
    """All that a plan depends on is known, so the start may end."""


def main() -> None:
    earlier = json.loads(sys.stdin.read())
    found = {folder: start(folder, earlier.get(folder)) for folder in sys.argv[1:]}
    sys.stdout.write(json.dumps(found))


def start(folder: str, earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the key of a model's plan with what its trace read, or with what has changed since an earlier trace."""
    found: dict[str, Any] = {}

    def traced(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dims: DynamicDims) -> Traced:
        call = ExampleCall.of(module, args, kwargs, dims)
        found["key"] = PlanStore.of(CompileCache(None, False), module, call, CompileConfig()).key
        if earlier is None:
            reads = trace(module, args, kwargs, dims).reads
            found.update(not_comparable=list(reads.not_comparable), reads=reads_as_data(reads))
        else:
            stored = reads_of_data(earlier["reads"])
            found["changed"], _ = find_changed_read(stored.places, stored.facts, stored.identities, module)
        raise Seen

    with patch.object(cold_start, "trace", traced), suppress(Seen):
        LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            compiler="eager",
            cudagraph_mode="NONE",
            max_model_len=24,
            max_num_seqs=2,
            num_kv_blocks=8,
        )
    return found


if __name__ == "__main__":
    main()
