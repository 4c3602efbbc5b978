"""Engines count their batches, and `cudagraph_capture_sizes="traffic"` captures what suits them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from piecegraph import SamplingParams
from piecegraph.errors import ConfigError
from piecegraph.paths import traffic_folder
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.speculative_config import SpeculativeConfig
from piecegraph.runner.cudagraphs.dispatch_counters import DispatchCounters
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.traffic.kept import Kept, read_all
from piecegraph.runner.traffic.traffic_sizes import with_traffic_sizes
from tests.runner.cudagraphs.test_dispatcher import decode, dispatcher
from tests.runner.test_dispatch_by_cost import arguments
from tests.runner.test_graphs import load

SOURCE = ModelSource(model="model")
KEPT = Kept(key="a" * 64, decode={5: 100}, mixed={21: 10}, max_num_seqs=8, max_num_tokens=32)


def config(**options: Any) -> EngineConfig:
    return EngineConfig(source=SOURCE, max_num_seqs=8, cudagraph_capture_sizes="traffic", **options)  # type: ignore[arg-type]


def test_traffic_takes_the_sizes_for_what_was_run() -> None:
    resolved, (note,) = with_traffic_sizes(config(), KEPT, 32)
    assert resolved.cudagraph_capture_sizes == (5, 21, 32) and not resolved.sizes_from_traffic
    assert note == (
        "cudagraph_capture_sizes='traffic': 3 sizes for 110 steps, by the number of tokens, because no times were "
        "measured"
    )


def test_without_history_the_default_ladder_stays() -> None:
    resolved, (note,) = with_traffic_sizes(config(), Kept(key=KEPT.key), 32)
    assert resolved.cudagraph_capture_sizes is None and "no steps of this model are known" in note


def test_nothing_is_looked_up_unless_asked_for() -> None:
    given = EngineConfig(source=SOURCE, max_num_seqs=8)
    assert with_traffic_sizes(given, KEPT, 32) == (given, ())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"tensor_parallel_size": 2}, "several ranks"),
        ({"speculative": SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 2})}, "speculative_"),
    ],
)
def test_ranks_and_drafts_keep_the_default_ladder(options: dict[str, Any], what: str) -> None:
    resolved, (note,) = with_traffic_sizes(config(**options), KEPT, 32)
    assert resolved.cudagraph_capture_sizes is None and f"is not available with {what}" in note


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="'trafic'; it must be sizes, such as .*, or 'traffic'"):
        EngineConfig(source=SOURCE, cudagraph_capture_sizes="trafic")  # type: ignore[arg-type]


def test_batches_are_counted_before_padding() -> None:
    counters, table = DispatchCounters(), dispatcher()
    for num_reqs in (1, 3, 3):
        counters.record(table.dispatch(**decode(num_reqs)), num_reqs, is_decode=True)
    counters.record(table.dispatch(num_tokens=9, num_reqs=2, uniform_token_count=None), 9)
    assert counters.shapes(is_decode=True) == {1: 1, 3: 2} and counters.shapes(is_decode=False) == {9: 1}


@pytest.mark.slow
def test_an_engine_counts_and_the_next_one_captures(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes are added up when engines are closed; answers do not depend on the sizes."""
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    prompts: Any = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def run(sizes: Any) -> tuple[list[Any], set[int], tuple[str, ...]]:
        with load(llama_dir, cudagraph_capture_sizes=sizes) as llm:
            answers = [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
            captured = {
                one.num_tokens for mode in llm.runner.graphs.graphs for one in llm.runner.graphs.descriptors(mode)
            }
            return answers, captured, llm.notes

    answers, captured, notes = run("traffic")
    assert captured == {1, 2, 4, 6, 16} and any("no steps of this model" in note for note in notes)
    (kept,) = read_all(traffic_folder())
    assert kept.decode == {3: 3} and kept.mixed == {9: 1} and (kept.max_num_seqs, kept.max_num_tokens) == (6, 16)
    again, captured, notes = run("traffic")
    assert again == answers and captured == {3, 6, 9, 16}
    assert any("3 sizes for 4 steps" in note for note in notes)
    assert read_all(traffic_folder())[0].decode == {3: 6}
    explained = explain(arguments(llama_dir, cudagraph_capture_sizes="traffic"))
    assert [row.num_tokens for row in explained.mixed] == [3, 9, 16]
