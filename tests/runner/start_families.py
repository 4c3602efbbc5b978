"""Load each folder given with `LLM`, in a process of its own; print what its plan would depend on, as JSON.

Standard input holds what an earlier process printed, or `{}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
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


def main() -> None:
    earlier = json.loads(sys.stdin.read())
    found: dict[str, dict[str, Any]] = {}
    for folder in sys.argv[1:]:

        def traced(
            module: nn.Module,
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
            dims: DynamicDims,
            folder: str = folder,
        ) -> Traced:
            changed = None
            if folder in earlier:
                stored = reads_of_data(earlier[folder]["reads"])
                changed, _ = find_changed_read(stored.places, stored.facts, stored.identities, module)
            call = ExampleCall.of(module, args, kwargs, dims)
            key = PlanStore.of(CompileCache(None, False), module, call, CompileConfig()).key
            made = trace(module, args, kwargs, dims)
            not_comparable = list(made.reads.not_comparable)
            found[folder] = {
                "key": key,
                "changed": changed,
                "not_comparable": not_comparable,
                "reads": reads_as_data(made.reads),
            }
            return made

        with (
            patch.object(cold_start, "trace", traced),
            LLM(
                folder,
                skip_tokenizer_init=True,
                dtype="float32",
                compiler="eager",
                cudagraph_mode="NONE",
                max_model_len=24,
                max_num_seqs=2,
                num_kv_blocks=8,
            ),
        ):
            pass
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
