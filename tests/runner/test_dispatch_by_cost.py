"""A start that measures its graphs: same tokens, a time for each graph, and a table that `explain` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import CaptureError
from piecegraph.paths import traffic_folder
from piecegraph.runner.cudagraphs.measured_dispatcher import MeasuredDispatcher
from piecegraph.runner.cudagraphs.measured_times import MeasuredTimes
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.offline.arguments import resolve_arguments
from piecegraph.runner.traffic.kept import add_to_kept, read_all
from piecegraph.tools.commands.explain import as_lines, as_record
from piecegraph.tools.report.page import as_page
from tests.runner.test_graphs import GREEDY, PROMPTS, SIZES, load

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))


def arguments(folder: Path, **options: Any) -> Any:
    """The config of `load` with these options, as `LLM` makes it."""
    import inspect

    from piecegraph import LLM

    defaults = {name: one.default for name, one in inspect.signature(LLM.__init__).parameters.items()}
    given: dict[str, Any] = {
        "model": folder,
        "dtype": "float32",
        "device": "cpu",
        "compiler": "eager",
        "attention_backend": "triton",
        "graph_kind": "recorded",
        "cudagraph_capture_sizes": SIZES,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
    }
    return resolve_arguments({**defaults, **given, **options})


def test_a_start_measures_each_graph_and_answers_as_before(llama_dir: Path) -> None:
    """Whatever the times are, tokens are the same; `explain` reads the times that were kept."""
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with load(llama_dir) as llm:
        expected = [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY, use_tqdm=False)]
        assert llm.runner.graphs.times == MeasuredTimes() and not isinstance(llm.runner.dispatcher, MeasuredDispatcher)
    with load(llama_dir, measure_graphs=True) as llm:
        graphs = llm.runner.graphs
        assert set(graphs.times.graphs) == {
            (mode, one) for mode in (FULL, PIECEWISE) for one in graphs.descriptors(mode)
        }
        assert set(graphs.times.uncaptured) == {*SIZES, 6} and all(s > 0 for s in graphs.times.graphs.values())
        assert isinstance(llm.runner.dispatcher, MeasuredDispatcher)
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY, use_tqdm=False)] == expected
        with pytest.raises(CaptureError, match="graphs are measured during the start only"):
            graphs.measure(FULL, graphs.descriptors(FULL))
        times = graphs.times
    (kept,) = read_all(traffic_folder())
    assert (kept.times, kept.model, kept.device) == (times, llama_dir.name, "cpu")
    notes = explain(arguments(llama_dir, measure_graphs=True)).notes
    assert (
        f"measure_graphs: dispatch is by the times of the last start that measured, {len(times.graphs)} graphs" in notes
    )


def test_explain_shows_what_is_cheaper(llama_dir: Path) -> None:
    """The table is the one that such times lead to, with both times; without times there is a note."""
    config = arguments(llama_dir, measure_graphs=True)
    before = explain(config)
    assert before.by_cost == () and any("no start of this model has measured" in note for note in before.notes)
    with load(llama_dir, measure_graphs=True):
        (kept,) = read_all(traffic_folder())
    decode = {size: BatchDescriptor(num_tokens=size, num_reqs=size, uniform_token_count=1) for size in (1, 2, 4, 6)}
    slow = MeasuredTimes({(FULL, decode[1]): 0.001, (FULL, decode[2]): 0.004, (FULL, decode[4]): 0.002})
    add_to_kept(traffic_folder(), type(kept)(key=kept.key, times=slow))
    explained = explain(config)
    lines = "\n".join(as_lines(explained))
    assert "decodes of 2 tokens -> FULL 4 2, not FULL 2 4" in lines
    assert [(row.first, row.last, row.num_tokens) for row in explained.decode] == [(1, 1, 1), (2, 4, 4), (5, 6, 6)]
    record = as_record("model", explained)
    (row,) = record["by_cost"]
    assert row == {
        "uniform_token_count": 1,
        "first": 2,
        "last": 2,
        "taken": {"mode": "FULL", "num_tokens": 4, "seconds": 0.002},
        "instead_of": {"mode": "FULL", "num_tokens": 2, "seconds": 0.004},
    }
    page = as_page({**record, "eager_pieces": {}}, seconds={"trace": 1.0}, weight_bytes=1, version="0")
    assert "Batches that run under something cheaper" in page and "<td>FULL 2</td>" in page and ">4 ms</td>" in page
    assert explain(arguments(llama_dir)).by_cost == ()


@pytest.mark.slow
def test_a_fast_start_measures_what_it_captures(llama_dir: Path) -> None:
    """Each graph after its capture, between two steps; the times are kept when the engine is closed."""
    with load(llama_dir, start="fast", measure_graphs=True) as llm:
        prompt: Any = [{"prompt_token_ids": PROMPTS[1]}]
        first = llm.generate(prompt, GREEDY, use_tqdm=False)
        llm.finish_start()
        graphs = llm.runner.graphs
        assert isinstance(llm.runner.dispatcher, MeasuredDispatcher)
        assert set(graphs.times.graphs) == {
            (mode, one) for mode in (FULL, PIECEWISE) for one in graphs.descriptors(mode)
        }
        second = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert first[0].outputs[0].token_ids == second[0].outputs[0].token_ids
    (kept,) = read_all(traffic_folder())
    assert kept.times == graphs.times
