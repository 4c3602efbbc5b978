"""An engine with adapters over random lives of requests, while adapters load, are removed, are evicted and are pinned.

The machine is that of tests/runner/engine/test_engine_states.py: arrivals, chunks, cached prefixes, aborts, ids that
are used again, preemptions, failing steps, forced modes, and every option of a request. Each token is held against
transformers alone, with the request's adapter merged into the weights.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import PreTrainedModel

from piecegraph import LLM, LoRARequest
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput
from tests.runner.engine.test_engine_states import (
    GRAPHS,
    MODES,
    NO_GRAPHS,
    TINY,
    Ask,
    EngineUnderTest,
    assert_much_was_seen,
    run_randomly,
)
from tests.runner.engine_model import AloneModel
from tests.runner.lora.adapters import write_adapter
from tests.runner.test_graphs import load

NUM_ADAPTERS, MAX_LORAS, MAX_CPU_LORAS = 5, 2, 3
LORA: dict[str, Any] = {
    "enable_lora": True, "max_loras": MAX_LORAS, "max_cpu_loras": MAX_CPU_LORAS, "max_lora_rank": 4
}  # fmt: skip


class AdaptedEngineUnderTest(EngineUnderTest):
    """An engine in which a request's prompt decides its adapter; about one in six has none."""

    def __init__(
        self, llm: LLM, models: Sequence[AloneModel], requests: Sequence[LoRARequest], *, steps_ahead: int, seed: int
    ) -> None:
        super().__init__(llm, models[0], steps_ahead=steps_ahead)
        self.events: Counter[str] = Counter()
        self.most_adapters = 0
        self._models, self._requests = models, requests
        self._random = Random(seed)

    def add(self, ask: Ask, request_id: str | None = None) -> str:
        engine: Any = self.llm.engine
        number = self._number(ask)
        engine.add_request = functools.partial(
            engine.add_request, lora_request=self._requests[number - 1] if number else None
        )
        try:
            return super().add(ask, request_id)
        finally:
            del engine.add_request

    def step(self, at_most: CUDAGraphMode = CUDAGraphMode.FULL, *, failure: str | None = None) -> None:
        if self._random.random() < 0.95:
            self._change_adapters()
        super().step(at_most, failure=failure)

    def settle(self) -> None:
        super().settle()
        slots = self.llm.engine.scheduler._lora_slots
        assert slots is not None and not slots.held, "adapters of requests that have ended"

    def _change_adapters(self) -> None:
        store, number = self.llm.engine.adapters, self._random.randint(1, NUM_ADAPTERS)
        event = self._random.choice(("load", "load", "remove", "pin"))
        before = set(store.loaded())
        if event == "load":
            store.add(self._requests[number - 1])
            event = "found" if number in before else "evict" if len(before) == MAX_CPU_LORAS else "load"
        elif event == "remove":
            store.remove(number)
        elif not store.pinned_digests:
            store.pin(number)
        self.events[event] += 1

    def _number(self, ask: Ask) -> int:
        """Return the number of a request's adapter; 0: it has none."""
        return (3 * len(ask.prompt) + ask.prompt[-1]) % (NUM_ADAPTERS + 1)

    def _take(self, output: RequestOutput) -> None:
        self._model = self._models[self._number(self.live[output.request_id].ask)]
        super()._take(output)

    def _check_and_execute(self, output: SchedulerOutput) -> None:
        requests = self.llm.engine.requests
        adapters = [requests[item.request_id].lora for item in output.scheduled]
        self.most_adapters = max(self.most_adapters, len({each.digest for each in adapters if each is not None}))
        super()._check_and_execute(output)


@pytest.fixture(scope="module")
def adapters(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[LoRARequest]]:
    """Return models to compare with, the first without an adapter, and the adapters of the others."""
    folder = tmp_path_factory.mktemp("adapters")
    models, requests = [AloneModel(llama)], []
    for number in range(1, NUM_ADAPTERS + 1):
        path = folder / str(number)
        models.append(AloneModel(write_adapter(llama, path, number)))
        requests.append(LoRARequest(f"adapter{number}", number, str(path)))
    return models, requests


@pytest.fixture(params=[(0, MODES, GRAPHS), (1, MODES[2:], NO_GRAPHS)], ids=["graphs, in step", "no graphs, ahead"])
def engine_and_modes(
    request: pytest.FixtureRequest, llama_dir: Path, adapters: tuple[list[Any], list[LoRARequest]]
) -> Iterator[tuple[AdaptedEngineUnderTest, Sequence[CUDAGraphMode]]]:
    steps_ahead, modes, options = request.param
    with load(llama_dir, async_scheduling=bool(steps_ahead), **TINY, **LORA, **options) as llm:
        yield AdaptedEngineUnderTest(llm, *adapters, steps_ahead=steps_ahead, seed=1), modes


def test_every_order_of_events_gives_the_tokens_of_the_merged_models(
    engine_and_modes: tuple[AdaptedEngineUnderTest, Sequence[CUDAGraphMode]],
) -> None:
    engine, _ = engine_and_modes
    run_randomly(engine, num_steps=100, seed=3)
    assert engine.most_adapters == MAX_LORAS and all(engine.events[each] for each in ("load", "evict", "remove", "pin"))


@pytest.mark.slow
def test_a_thousand_loads_and_removals_under_load_give_no_wrong_token(
    engine_and_modes: tuple[AdaptedEngineUnderTest, Sequence[CUDAGraphMode]],
) -> None:
    engine, modes = engine_and_modes
    run_randomly(engine, num_steps=1_100, seed=7)
    assert_much_was_seen(engine, 1_100, modes)
    assert engine.events.total() >= 1_000 and engine.events["evict"] > 100, engine.events
