"""Random lives of requests over each layout of ranks and each family of models, checked by the engine's machine.

`python -m tests.runner.distributed.random_lives [LAYOUT or MODEL ...]` runs every family over every layout, 300 steps
each and 60 of the embedded model, and writes a line for each. Ranks and engines are threads.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.models.embedded_model import embedded_model_dir
from tests.runner.data_parallel.engines_in_threads import llm_of_engines
from tests.runner.engine.test_engine_states import (
    EOS,
    GRAPHS,
    MAX_MODEL_LEN,
    TINY,
    Ask,
    EngineUnderTest,
    random_ask,
    run_randomly,
)
from tests.runner.engine_model import AloneModel, assert_answer, assert_ends_where_it_must
from tests.runner.pipeline_parallel.stages_in_threads import llm_of_threads
from tests.runner.tiny_models import make_config, random_model, save

LAYOUTS: Mapping[str, Mapping[str, int]] = {
    "TP 2": {"tensor_parallel_size": 2},
    "TP 3": {"tensor_parallel_size": 3},
    "TP 4": {"tensor_parallel_size": 4},
    "PP 2": {"pipeline_parallel_size": 2},
    "TP 2 x PP 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "EP 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "DP 2": {"data_parallel_size": 2},
    "PP 2 x DP 2": {"pipeline_parallel_size": 2, "data_parallel_size": 2},
}
EMBEDDED = "embedded"
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 16, **_MOE}),
}
COMBINATIONS = [
    (layout, name)
    for layout in LAYOUTS
    for name in (*MODELS, EMBEDDED)
    if layout != "EP 2" or name in ("mixtral", "qwen3-moe")
]


def live(layout: str, name: str, *, num_steps: int, seed: int = 0, num_events: int = 100) -> str:
    """Run requests at random, check every answer, and return what was seen.

    Arrivals, aborts, chunks, cached prefixes, preemptions, sampling with seeds, and steps that fail. `num_events`: how
    many of these there are before all requests end, and others come.
    """
    options = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        model = _embedded_model(Path(folder)) if name == EMBEDDED else _tiny_model(name, Path(folder))
        if "data_parallel_size" in options:
            return _live_behind_a_front_door(layout, Path(folder), model, num_steps, seed)
        arguments = {**options, **TINY, **GRAPHS, "graph_kind": "recorded"}
        with llm_of_threads(Path(folder), **arguments) as llm:
            stages = options.get("pipeline_parallel_size", 1)
            engine = EngineUnderTest(llm, AloneModel(model), steps_ahead=stages - 1)
            draw = _ask_of_large_vocabulary if name == EMBEDDED else random_ask
            run_randomly(engine, num_steps=num_steps, seed=seed, draw=draw, num_events=num_events)
            hits = llm.engine.stats.num_prefix_hits
    wanted = ("length",) if name == EMBEDDED else ("stop", "length")
    assert hits and engine.num_repeated and all(engine.finished[reason] for reason in wanted), "little was seen"
    return (
        f"{engine.num_steps} steps ({engine.num_failed_steps} failed), {sum(engine.finished.values())} answers, "
        f"{engine.finished['abort']} aborts, {engine.num_preemptions} preemptions, {hits} prefix hits"
    )


def _tiny_model(name: str, folder: Path) -> PreTrainedModel:
    kind, options = MODELS[name]
    model = random_model(make_config(kind, vocab_size=261, eos_token_id=EOS, **options))
    save(model, folder)
    return model


def _embedded_model(folder: Path) -> PreTrainedModel:
    """Return the embedded model with the machine's end token, and make `folder` its folder."""
    source = embedded_model_dir()
    for file in source.glob("*.safetensors"):
        (folder / file.name).symlink_to(file)
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((source / name).read_text())
        (folder / name).write_text(json.dumps({**fields, "eos_token_id": EOS}))
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    return model


def _ask_of_large_vocabulary(random: Random) -> Ask:
    """Return an `Ask` without log probabilities of all tokens."""
    ask = random_ask(random)
    return replace(ask, params=replace(ask.params, logprobs=2)) if ask.params.logprobs == -1 else ask


def _live_behind_a_front_door(layout: str, folder: Path, model: PreTrainedModel, num_steps: int, seed: int) -> str:
    """The same of two engines, whose steps are their own: requests arrive and are aborted between the front door's."""
    random, alone = Random(seed), AloneModel(model)
    asks: dict[str, Ask] = {}
    unfinished: set[str] = set()
    num_answers = num_aborts = number = 0
    size = LAYOUTS[layout]["data_parallel_size"]
    ranks = {name: value for name, value in LAYOUTS[layout].items() if name != "data_parallel_size"}
    with llm_of_engines(folder, size, **ranks, **TINY, **GRAPHS, graph_kind="recorded") as llm:
        for _ in range(num_steps):
            event = random.random()
            if event < 0.3 or not unfinished:
                ask = _ask_of_large_vocabulary(random)
                if ask.params.seed is None and not ask.params.is_greedy:
                    continue
                name, number = str(number), number + 1
                llm.engine.add_request(name, ask.prompt, ask.params, priority=ask.priority, cache_salt=ask.cache_salt)
                asks[name] = ask
                unfinished.add(name)
            elif event < 0.33:
                name = random.choice(sorted(unfinished))
                llm.engine.abort(name)
                unfinished.discard(name)
                num_aborts += 1
            num_answers += _take(llm, alone, asks, unfinished)
        while llm.engine.has_unfinished:
            num_answers += _take(llm, alone, asks, unfinished)
        stats = llm.engine.stats
    assert not unfinished and num_answers, "little was seen; how much more depends on how fast the engines step"
    return (
        f"{num_steps} events, {num_answers} answers, {num_aborts} aborts, {stats.num_preemptions} preemptions, "
        f"{stats.num_prefix_hits} prefix hits"
    )


def _take(llm: LLM, alone: AloneModel, asks: Mapping[str, Ask], unfinished: set[str]) -> int:
    """Take the outputs of a step, check those that are finished, and return their number."""
    outputs = llm.engine.step() if llm.engine.has_unfinished else []
    finished = [output for output in outputs if output.finished and output.request_id in unfinished]
    for output in finished:
        unfinished.discard(output.request_id)
        _check(alone, asks[output.request_id], output)
    return len(finished)


def _check(alone: AloneModel, ask: Ask, output: RequestOutput) -> None:
    params: SamplingParams = ask.params
    for one in output.outputs:
        reason, tokens = one.finish_reason, one.token_ids
        assert reason is not None
        at_most = MAX_MODEL_LEN - len(ask.prompt)
        assert_ends_where_it_must(tokens, params, reason, at_most=at_most, eos_token_id=EOS)
        seed = 0 if params.seed is None else (params.seed + one.index) % 2**63
        assert_answer(alone, ask.prompt, tokens, params, seed=seed, eos_token_id=EOS)


def main() -> None:
    """Run the layouts and models that are named, or all."""
    layouts = [each for each in LAYOUTS if each in sys.argv[1:]] or list(LAYOUTS)
    models = [each for each in (*MODELS, EMBEDDED) if each in sys.argv[1:]] or [*MODELS, EMBEDDED]
    for layout, name in COMBINATIONS:
        if layout in layouts and name in models:
            seen = live(layout, name, num_steps=60 if name == EMBEDDED else 300)
            sys.stdout.write(f"{layout}, {name}: {seen}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
