"""Batches of decode steps that several engines share: who has how many requests, and what they leave behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from piecegraph import LLM, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError
from piecegraph.runner.distributed.worker import Worker
from piecegraph.tools.bench.decode_batch import DecodeBatch, Shares, share_of
from piecegraph.tools.bench.latency import measure_latency
from piecegraph.tools.bench.measure.ceilings import Ceilings
from piecegraph.tools.bench.measure.engines import from_engines, has_own_engine
from piecegraph.tools.bench.measure.offline_workload import make_workload
from piecegraph.tools.bench.throughput import measure_throughput
from tests.runner.data_parallel.engines_in_threads import llm_of_engines
from tests.runner.tiny_models import VOCAB_SIZE, llama_config, random_model, save

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

RATES = Ceilings(read_bytes_per_s=1e12, flops_per_s=1e15)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save(random_model(llama_config()), tmp_path_factory.mktemp("engines"))
    with llm_of_engines(folder, 2, num_kv_blocks=16) as llm:
        yield llm


def num_requests(worker: Worker, shares: Shares) -> int | None:
    """Return how many requests decode on a rank."""
    steps = share_of(shares, worker.loaded)
    return None if steps is None else steps.batch.num_decode_reqs


def num_unfinished(holder: object) -> int:
    return holder.engine.num_unfinished  # type: ignore[attr-defined]


@pytest.mark.parametrize(("batch_size", "shares"), [(1, [1]), (4, [2, 2]), (5, [3, 2])])
def test_engines_share_a_batch_and_keep_nothing_of_it(engines: LLM, batch_size: int, shares: list[int]) -> None:
    """Requests are there as long as the batch is open, however long that is: the engines do not step meanwhile."""
    assert not has_own_engine(engines)
    with DecodeBatch(engines, batch_size, context=4, steps=2, prefill_tokens=0) as batch:
        assert batch.on_ranks(num_requests) == shares
        assert sorted(from_engines(engines, num_unfinished), reverse=True)[: len(shares)] == shares
    assert from_engines(engines, num_unfinished) == [0, 0]


def test_a_row_is_of_all_engines_and_they_answer_afterwards(engines: LLM) -> None:
    """The floor is that of the largest share."""
    rows = measure_latency(engines, [3, 5, 6], [CUDAGraphMode.NONE], context=4, steps=3, ceilings=RATES)
    assert [row.batch_size for row in rows] == [3, 5, 6]
    assert rows[2].padded_tokens == 3
    assert rows[1].floor_ms == rows[2].floor_ms > rows[0].floor_ms > 0
    assert all(row.ms > 0 for row in rows)
    (output,) = engines.generate(
        [{"prompt_token_ids": [5]}], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False
    )
    assert len(output.outputs[0].token_ids) == 2


def test_a_mixed_step_has_a_prompt_on_each_engine(engines: LLM) -> None:
    (row,) = measure_latency(engines, [2], [CUDAGraphMode.NONE], context=4, steps=2, ceilings=RATES, prefill_tokens=6)
    assert (row.batch_size, row.prefill_tokens, row.padded_tokens) == (2, 6, 1 + 6)


def test_what_does_not_run_at_once_is_refused_and_the_engines_go_on(engines: LLM) -> None:
    with pytest.raises(ConfigError, match="do not run at once"), DecodeBatch(engines, 10, 4, 2, 0):
        pass
    assert from_engines(engines, num_unfinished) == [0, 0]


def test_a_workload_goes_to_all_engines(engines: LLM) -> None:
    """Every token is computed once, on one of them."""
    workload = make_workload(6, (4, 20), (5, 12), vocab_size=VOCAB_SIZE, seed=0)
    (row,) = measure_throughput(engines, workload, [0.0], ceilings=RATES)
    run = row.median
    assert run.computed_tokens == sum(request.prompt + request.output - 1 for request in workload.lengths)
    assert len(run.steps_by_engine) == 2 and min(run.steps_by_engine) >= min(workload.output_lens)
    assert run.steps == sum(run.steps_by_engine) == sum(run.steps_by_mode.values())
    assert (run.prefix_hit_rate, run.preemptions) == (0, 0)
    assert 0 < row.floor_s < run.seconds
