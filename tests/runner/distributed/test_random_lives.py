"""The machine of random lives of requests, over two ranks in processes: `runner/distributed/group_runner.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.runner.distributed.test_executor import SLOW_MACHINE_S
from tests.runner.engine.test_engine_states import (
    GRAPHS,
    MODES,
    TINY,
    EngineUnderTest,
    assert_much_was_seen,
    run_randomly,
)
from tests.runner.engine_model import AloneModel
from tests.runner.test_graphs import load


@pytest.mark.slow
def test_two_ranks_give_the_right_outputs_in_every_order_of_events(llama_dir: Path, llama: PreTrainedModel) -> None:
    """Arrivals, aborts, chunks, prefixes, preemptions, seeds, failing steps and forced modes."""
    with load(llama_dir, tensor_parallel_size=2, distributed_timeout_seconds=SLOW_MACHINE_S, **TINY, **GRAPHS) as llm:
        engine = EngineUnderTest(llm, AloneModel(llama), steps_ahead=0)
        run_randomly(engine, num_steps=300, seed=0)
        assert_much_was_seen(engine, 300, MODES)
