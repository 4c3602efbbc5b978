"""Tests that the workload is repeatable, the floor below any schedule, and the clock without side effects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from piecegraph.errors import ConfigError
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.llm import LLM
from piecegraph.tools.bench.measure.ceilings import Ceilings
from piecegraph.tools.bench.measure.floor import ModelSize
from piecegraph.tools.bench.measure.offline_workload import Lengths, Workload, make_workload
from piecegraph.tools.bench.session import bench_arguments
from piecegraph.tools.bench.step_profile import (
    LAUNCH_GAP_S,
    PARTS,
    PROFILED_STEPS,
    WINDOW_STEPS,
    StepClock,
    StepTimes,
    gpu_idle,
    pauses,
    profile_steps,
    spread,
    steady_steps,
)
from piecegraph.tools.bench.throughput import (
    ThroughputRow,
    ThroughputRun,
    measure_throughput,
    warm_up,
    workload_floor_seconds,
)
from piecegraph.tools.command_line.options import LLM_FLAGS
from tests.runner.tiny_models import VOCAB_SIZE, llama_config, random_model, save

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

RATES = Ceilings(read_bytes_per_s=1e3, flops_per_s=1e6)


def layer(window: int = 0) -> AttentionLayer:
    """Return a layer's cache with 4 bytes a token."""
    return AttentionLayer(
        name="attention",
        num_q_heads=1,
        num_kv_heads=1,
        key_dim=1,
        value_dim=1,
        dtype=torch.bfloat16,
        scale=1.0,
        window=window,
        softcap=0.0,
        has_sinks=False,
    )


def model(*layers: AttentionLayer, matmul_params: int = 0, logits_params: int = 0, weight_bytes: int = 0) -> ModelSize:
    return ModelSize(matmul_params=matmul_params, logits_params=logits_params, weight_bytes=weight_bytes, layers=layers)


def floor(size: ModelSize, requests: list[Lengths], **options: int) -> float:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 1024, **options}
    return workload_floor_seconds(size, RATES, requests, **limits)


class TestWorkload:
    def test_a_seed_gives_nano_vllms_requests(self) -> None:
        """A prompt's length is drawn before its ids, and all prompts before the outputs' lengths."""
        random = Random(0)
        prompts = tuple([random.randint(0, 10_000) for _ in range(random.randint(100, 1024))] for _ in range(3))
        outputs = tuple(random.randint(100, 1024) for _ in range(3))
        made = make_workload(3, (100, 1024), (100, 1024), vocab_size=151_936, seed=0)
        assert made == Workload(prompts=prompts, output_lens=outputs, shared_prefix=0)

    def test_lengths_and_ids_are_in_range(self) -> None:
        made = make_workload(50, (2, 5), (3, 4), vocab_size=20, seed=1)
        assert {len(prompt) for prompt in made.prompts} == {2, 3, 4, 5}
        assert set(made.output_lens) == {3, 4}
        assert {token for prompt in made.prompts for token in prompt} == set(range(20))

    def test_a_shared_prefix_comes_before_the_same_prompts(self) -> None:
        alone = make_workload(3, (2, 5), (3, 4), vocab_size=100, seed=2)
        made = make_workload(3, (2, 5), (3, 4), shared_prefix=7, vocab_size=100, seed=2)
        assert len({tuple(prompt[:7]) for prompt in made.prompts}) == 1
        assert tuple(prompt[7:] for prompt in made.prompts) == alone.prompts
        assert made.output_lens == alone.output_lens


class TestFloor:
    def test_weights_are_read_once_a_step(self) -> None:
        """Four tokens take four steps, however many requests there are."""
        size = model(weight_bytes=1000)
        assert floor(size, [Lengths(5, 4)]) == pytest.approx(4)
        assert floor(size, [Lengths(5, 4), Lengths(9, 2)]) == pytest.approx(4)

    def test_more_requests_than_run_at_once_take_more_steps(self) -> None:
        assert floor(model(weight_bytes=1000), [Lengths(5, 4)] * 3, max_num_seqs=2) == pytest.approx(6)

    def test_more_tokens_than_a_step_computes_take_more_steps(self) -> None:
        assert floor(model(weight_bytes=1000), [Lengths(30, 1)], max_num_batched_tokens=4) == pytest.approx(8)

    def test_every_computed_token_is_multiplied_and_every_drawn_one_has_logits(self) -> None:
        """The last token of an output is drawn only."""
        size = model(matmul_params=1_000_000, logits_params=400_000)
        computed, drawn = 5 + 4 - 1, 4
        assert floor(size, [Lengths(5, 4)]) == pytest.approx(2 * (0.6 * computed + 0.4 * drawn))

    def test_engines_divide_the_work_and_each_reads_all_weights(self) -> None:
        """Six requests of four tokens take twelve steps of two requests, and six of two engines of two."""
        requests, size = [Lengths(5, 4)] * 6, model(layer(), weight_bytes=1000)
        cached = 6 * (5 + 6 + 7) * 4e-3
        assert floor(size, requests, max_num_seqs=2) == pytest.approx(12 + cached)
        assert floor(size, requests, max_num_seqs=2, num_engines=2) == pytest.approx(6 + cached / 2)
        tokens = model(matmul_params=1_000_000)
        assert floor(tokens, requests, num_engines=2) == pytest.approx(floor(tokens, requests) / 2)

    def test_a_shared_prefix_is_multiplied_once(self) -> None:
        size = model(matmul_params=1_000_000)
        assert floor(size, [Lengths(12, 1)] * 3, shared_prefix=10) == pytest.approx(2 * (10 + 3 * 2))

    def test_each_decoded_token_reads_those_before_it(self) -> None:
        """The first token comes with the prompt, which reads nothing."""
        assert floor(model(layer()), [Lengths(5, 1)]) == 0
        assert floor(model(layer()), [Lengths(5, 4)]) == pytest.approx((5 + 6 + 7) * 4e-3)

    def test_a_window_reads_no_more_than_it_sees(self) -> None:
        """A window of six tokens holds the query's own, whose key and value are not read from the cache."""
        assert floor(model(layer(window=6), layer()), [Lengths(5, 4)]) == pytest.approx((5 + 5 + 5 + 5 + 6 + 7) * 4e-3)

    def test_a_chunk_is_read_from_its_beginning(self) -> None:
        """The second decoded token begins a chunk, and reads nothing."""
        chunked = replace(layer(), chunk_size=6)
        assert floor(model(chunked, layer()), [Lengths(5, 4)]) == pytest.approx((5 + 0 + 1 + 5 + 6 + 7) * 4e-3)


class TestPauses:
    def test_overlapping_intervals_in_any_order_count_once(self) -> None:
        assert pauses([(6, 7), (1, 3), (2, 4)], 0, 10) == [1, 2, 3]

    def test_an_interval_within_another_ends_nothing(self) -> None:
        assert pauses([(1, 8), (2, 3)], 0, 10) == [1, 2]

    def test_what_reaches_beyond_the_window_is_cut(self) -> None:
        assert pauses([(-5, 1), (4, 20)], 0, 10) == [3]
        assert pauses([(-5, -1), (12, 20)], 0, 10) == [10]

    def test_a_busy_window_has_none(self) -> None:
        assert pauses([(0, 5), (5, 10)], 0, 10) == []


def test_gpu_idle_is_of_the_window_without_its_margins() -> None:
    """Steps take 1 ms: a kernel of 0.8 ms, a pause as between a graph's kernels, a short kernel, and a pause."""
    tiny = LAUNCH_GAP_S / 2
    kernels = []
    for step in range(PROFILED_STEPS):
        begin = step * 1e-3
        kernels += [(begin, begin + 0.8e-3), (begin + 0.8e-3 + tiny, begin + 0.9e-3)]
    kernels += [(begin + 0.9e-3, begin + 1e-3)]  # the last step ends with a kernel, so that the span is whole
    del kernels[2]  # a long pause in the margin
    found = gpu_idle(kernels)
    assert found.steps == WINDOW_STEPS
    assert found.window_ms == pytest.approx(WINDOW_STEPS)
    assert found.idle_share_between_launches == pytest.approx(0.1)
    assert found.idle_share == pytest.approx(0.1 + tiny / 1e-3)


def test_steady_steps_are_the_largest_batch_that_only_decodes() -> None:
    def step(batch_size: int, is_decode: bool) -> StepTimes:
        return StepTimes(batch_size=batch_size, is_decode=is_decode, context=0.0, parts={})

    steps = [step(4, False), step(2, True), step(3, True), step(3, False), step(3, True)]
    assert steady_steps(steps) == [steps[2], steps[4]]
    assert steady_steps(steps[:1]) == []


def test_a_spread_is_in_milliseconds() -> None:
    found = spread([i / 1e3 for i in range(11)])
    assert found.mean == pytest.approx(5)
    assert found.p90 == pytest.approx(9)
    assert spread([2e-3]).p90 == pytest.approx(2)


def test_a_rows_figures_are_of_its_median_run() -> None:
    def run(seconds: float, steps: int) -> ThroughputRun:
        return ThroughputRun(
            seconds=seconds,
            steps=steps,
            steps_by_engine=(steps,),
            steps_by_mode={},
            computed_tokens=0,
            prefix_hit_rate=0.0,
            preemptions=0,
        )

    runs = (run(4.0, 10), run(2.0, 20), run(8.0, 30))
    record = ThroughputRow(temperature=0.0, prompt_tokens=60, output_tokens=40, floor_s=1.0, runs=runs).as_record()
    assert (record["seconds"], record["seconds_min"], record["seconds_max"]) == (4, 2, 8)
    assert (record["output_tokens_per_s"], record["total_tokens_per_s"]) == (10, 25)
    assert (record["steps"], record["mean_batch"], record["share_of_floor"]) == (10, 4, 0.25)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(llama_config()), tmp_path_factory.mktemp("throughput"))


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        device="cpu",
        compiler="eager",
        attention_backend="triton",
        graph_kind="recorded",
        cudagraph_capture_sizes=[1, 2, 4],
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_kv_blocks=64,
        **options,
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm_ahead(folder: Path) -> Iterator[LLM]:
    """An `LLM` that launches a step while the preceding one runs, as on a GPU."""
    with open_llm(folder, async_scheduling=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload(6, (4, 20), (5, 12), vocab_size=VOCAB_SIZE, seed=0)


def test_a_run_computes_every_token_once_and_repeats(llm: LLM, workload: Workload) -> None:
    """Neither the warm-up nor an earlier run leaves a prefix that the next would find."""
    rows = measure_throughput(llm, workload, [0.0, 0.6], ceilings=RATES, repeat=2)
    assert [row.temperature for row in rows] == [0.0, 0.6]
    computed = sum(request.prompt + request.output - 1 for request in workload.lengths)
    for run in [run for row in rows for run in row.runs]:
        assert run.computed_tokens == computed
        assert (run.prefix_hit_rate, run.preemptions) == (0, 0)
        assert run.steps == sum(run.steps_by_mode.values()) >= max(workload.output_lens)
        assert run.steps_by_mode["FULL"] > 0
    assert {run.steps for row in rows for run in row.runs} == {rows[0].median.steps}
    assert all(row.floor_s > 0 for row in rows)


def test_a_shared_prefix_is_found(llm: LLM) -> None:
    """The prefix has two blocks of 16 tokens; requests that come after they are computed do not compute them again."""
    shared = make_workload(6, (4, 8), (5, 12), shared_prefix=32, vocab_size=VOCAB_SIZE, seed=0)
    (row,) = measure_throughput(llm, shared, [0.0], ceilings=RATES)
    everything = sum(request.prompt + request.output - 1 for request in shared.lengths)
    assert row.median.prefix_hit_rate > 0
    assert everything - row.median.computed_tokens >= 32


def test_the_warm_up_varies_the_batch(llm: LLM, workload: Workload) -> None:
    with StepClock(llm) as clock:
        warm_up(llm, workload, [0.0])
    assert {step.batch_size for step in clock.steps} == {1, 2, 3, 4}


def test_requests_that_do_not_fit_are_refused(llm: LLM) -> None:
    workload = make_workload(1, (90, 90), (7, 7), vocab_size=VOCAB_SIZE, seed=0)
    with pytest.raises(ConfigError, match="a request of 97 tokens, prompt and output, does not fit max_model_len=96;"):
        measure_throughput(llm, workload, [0.0], ceilings=RATES)


def test_the_clock_sees_every_step_and_leaves_no_trace(llm: LLM, workload: Workload) -> None:
    """Each part's time is in its step, and the engine is as it was."""
    owners = (llm.engine, llm.engine.scheduler, llm.runner)
    before = [set(vars(owner)) for owner in owners]
    told: list[StepTimes] = []
    batches_before = sum(llm.runner.counters.by_mode().values())
    with StepClock(llm, told.append) as clock:
        warm_up(llm, workload, [0.0])
    assert [set(vars(owner)) for owner in owners] == before
    assert clock.steps == told
    assert len(told) == sum(llm.runner.counters.by_mode().values()) - batches_before
    assert all(set(step.parts) == set(PARTS) and min(step.parts.values()) >= 0 for step in told)
    assert all(step.parts[name] > 0 for step in told for name in PARTS if name != "between_steps")
    assert told[0].context == 0 and not told[0].is_decode
    assert told[-1].is_decode


def test_the_clock_follows_an_engine_that_is_a_step_ahead(llm_ahead: LLM, workload: Workload) -> None:
    """Its first step waits for nothing, and the call that only takes in the last output is no step."""
    batches_before = sum(llm_ahead.runner.counters.by_mode().values())
    with StepClock(llm_ahead) as clock:
        warm_up(llm_ahead, workload, [0.0])
    assert len(clock.steps) == sum(llm_ahead.runner.counters.by_mode().values()) - batches_before
    assert clock.steps[0].parts["output_wait"] == 0
    assert all(step.parts["output_wait"] > 0 for step in clock.steps[1:])


def test_a_profile_is_of_the_steady_steps(llm: LLM, workload: Workload) -> None:
    profiles = profile_steps(llm, workload, [0.0, 0.6], ceilings=RATES)
    assert [profile.temperature for profile in profiles] == [0.0, 0.6]
    for found in profiles:
        assert found.batch_size == 4
        assert found.steps >= 1
        assert list(found.parts_ms) == list(PARTS)
        assert found.step_ms.mean == pytest.approx(sum(part.mean for part in found.parts_ms.values()))
        assert found.host_ms.mean == pytest.approx(found.step_ms.mean - found.parts_ms["output_wait"].mean)
        assert found.floor_ms > 0
        assert found.gpu is None


def test_a_workload_that_never_only_decodes_has_no_profile(llm: LLM) -> None:
    workload = make_workload(3, (4, 8), (1, 1), vocab_size=VOCAB_SIZE, seed=0)
    assert profile_steps(llm, workload, [0.0], ceilings=RATES) == []


@pytest.mark.gpu
def test_the_gpus_idle_share_is_of_a_whole_window(tmp_path: Path) -> None:
    """A window is found where enough steps follow one another; every kernel of a graph is seen."""
    config = llama_config(hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=256)
    folder = save(random_model(config), tmp_path)
    long = make_workload(4, (4, 20), (100, 120), vocab_size=VOCAB_SIZE, seed=0)
    short = make_workload(4, (4, 20), (10, 20), vocab_size=VOCAB_SIZE, seed=0)
    with LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=4, num_kv_blocks=128) as llm:
        warm_up(llm, long, [0.0])
        (found,) = profile_steps(llm, long, [0.0], ceilings=RATES)
        (too_short,) = profile_steps(llm, short, [0.0], ceilings=RATES)
    assert found.gpu is not None
    assert found.gpu.steps == WINDOW_STEPS
    assert 0 <= found.gpu.idle_share_between_launches <= found.gpu.idle_share < 1
    assert too_short.gpu is None


def test_several_engines_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="of one engine, in its process; leave data_parallel_size out, or use"):
        bench_arguments("nowhere", {flag.name: flag.default for flag in LLM_FLAGS} | {"data_parallel_size": 2})
