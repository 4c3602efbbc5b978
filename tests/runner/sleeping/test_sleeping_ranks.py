"""Ranks of a model sleep and wake up together: each gives its own memory back, and answers are those from before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from piecegraph import LLM
from piecegraph.errors import UsageError
from piecegraph.runner.distributed.external_launcher import ExternalLauncherExecutor
from piecegraph.runner.startup.loaded import Loaded
from tests.runner.pipeline_parallel.stages_in_threads import ThreadsExecutor, llm_of_threads
from tests.runner.sleeping.test_sleep import answers
from tests.runner.tiny_models import llama_config, random_model, save


def magnitudes(llm: LLM) -> list[float]:
    """The sum of the magnitudes of each rank's weights."""
    executor, first = llm._executor, llm._generator
    assert isinstance(executor, ThreadsExecutor) and isinstance(first, Loaded)
    models = [one.model.model for one in (first, *(executor.loaded[rank] for rank in sorted(executor.loaded)))]
    return [sum(each.abs().sum().item() for each in model.parameters()) for model in models]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["TP 2", "PP 2"])
def test_ranks_sleep_and_answer_as_before(layout: Mapping[str, int], tmp_path: Path) -> None:
    """Level 1 drops their caches; level 2 their weights too, which each reads again."""
    config = llama_config(vocab_size=256, hidden_size=64, intermediate_size=256)
    first, second = (save(random_model(config, seed), tmp_path / str(seed)) for seed in (0, 1))
    with llm_of_threads(first, graph_kind="recorded", **layout) as llm:
        before, weights = answers(llm), magnitudes(llm)
        freed = []
        for level in (1, 2):
            freed.append(llm.sleep(level))
            with pytest.raises(UsageError, match="the engine sleeps; call wake_up first"):
                answers(llm)
            with pytest.raises(UsageError, match="the engine sleeps"):
                llm.reload_weights()
            if level == 2:
                assert all(now < then for now, then in zip(magnitudes(llm), weights, strict=True))
            llm.wake_up()
            assert magnitudes(llm) == weights and answers(llm) == before
        assert 0 < freed[0] < freed[1]
        llm.reload_weights(second)
        changed = answers(llm)
        with pytest.raises(UsageError, match="after reload_weights"):
            llm.sleep(2)
        llm.sleep(1)
        llm.wake_up()
        assert answers(llm) == changed != before


def test_ranks_of_a_launcher_do_not_sleep(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would have to be told by its own program, and all at the same step."""
    monkeypatch.setattr(llm, "_executor", ExternalLauncherExecutor.__new__(ExternalLauncherExecutor))
    with pytest.raises(UsageError, match="external_launcher"):
        llm.sleep()
    assert not llm.is_sleeping
