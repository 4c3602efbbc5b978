"""The runner of a rank, made once all ranks have proved to be alike."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from piecegraph.passes.ops.collectives import running_in
from piecegraph.progress import OnPhase, Phase, timed_phase
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.models.load import LoadedModel
from piecegraph.runner.pipeline_parallel.stage_step import stage_step
from piecegraph.runner.startup.compiling.compile_model import CompiledLM
from piecegraph.runner.startup.make_runner import MadeRunner
from piecegraph.runner.tensor_parallel.parallel import Parallel, graph_facts, rank_facts
from piecegraph.runner.tensor_parallel.plan import check_heads

if TYPE_CHECKING:
    pass


def make_runner_of_rank(
    parallel: Parallel,
    loaded: LoadedModel,
    model: CompiledLM,
    config: EngineConfig,
    make_runner: Callable[..., MadeRunner],
    on_phase: OnPhase | None,
) -> MadeRunner:
    """Return what `make_runner`, `make_runner` with its arguments, returns, once all ranks have proved to be alike."""
    group, everyone = parallel.group, parallel.everyone
    check_heads(loaded.rank_plan, [(layer.name, layer.num_q_heads, layer.num_kv_heads) for layer in model.layers])
    facts = rank_facts(config.source.weight_files, config=str(loaded.config.to_json_string()))
    facts["dtype (with dtype='auto' each machine's processor decides)"] = str(loaded.dtype)
    with timed_phase(on_phase, "ranks"):
        everyone.agree("facts", facts)
        if group.engines is not None:
            group.engines.agree("facts", facts)
        group.agree("graph", graph_facts(model.compiled.source))
        group.connect(loaded.device)
        group.prepare_norm(getattr(loaded.config.get_text_config(decoder=True), "hidden_size", None) or 0, loaded.dtype)
        parallel.connect_others(loaded.device)
        read = everyone.exchange("bytes read", json.dumps(loaded.bytes_read))
    if on_phase is not None:
        on_phase(Phase(name="ranks", detail=_bytes_read(read)))
        for each in (group, group.engines):
            if each is not None and each.sums_note:
                on_phase(Phase(name="ranks", detail=each.sums_note))
    plan = loaded.stage
    staged = None if plan is None else functools.partial(stage_step, plan=plan, dtype=loaded.dtype)
    with running_in(group), group.capturing():
        made: MadeRunner = make_runner(staged, parallel.runner_kind)
    return made._replace(num_blocks=everyone.smallest("num_blocks", made.num_blocks))


def _bytes_read(read: Sequence[str]) -> str:
    """Return what each rank has read of the weights, from JSON by rank: null where it is not known."""
    sizes = [None if text == "null" else f"{int(text) / 2**20:.1f} MiB" for text in read]
    return "weights read: " + ", ".join(f"rank {rank} {size or 'all'}" for rank, size in enumerate(sizes))
