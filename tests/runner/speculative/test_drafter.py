"""Answers with a draft model are those without, whatever the draft says; and all that a model drafts for itself is
accepted, which shows that the draft's cache holds the right keys for every token."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM, RequestOutput, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.cudagraphs.capture_sizes import draft_descriptor
from piecegraph.runner.scheduling.speculation_stats import SpeculationStats
from piecegraph.runner.speculative.drafter import Drafter
from tests.runner.speculative.draft_models import NUM_DRAFTS, drafts_by, save_first_layers
from tests.runner.speculative.drafting_llm import SIZES, answers, assert_same
from tests.runner.step_counts import counted
from tests.runner.test_graphs import load

FULL, NONE = CUDAGraphMode.FULL, CUDAGraphMode.NONE
STEPS = pytest.mark.parametrize("is_ahead", [False, True], ids=["each step awaited", "a step ahead"])
SHARED = [Random(1).randrange(3, 260) for _ in range(32)]
TEXTS = [[5], [9], *([*SHARED[: 4 * n], n] for n in (1, 2, 4)), SHARED[:12], SHARED[:24], SHARED[1:24]]
"""One token, prompts of whole blocks and of a token more, and prompts in chunks; some share a prefix."""


@pytest.fixture(scope="module")
def half(llama: PreTrainedModel, llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_first_layers(llama, 1, tmp_path_factory.mktemp("half"), llama_dir)


def drafter_of(llm: LLM) -> Drafter:
    drafter = getattr(llm.runner, "drafter", None)
    assert isinstance(drafter, Drafter)
    return drafter


def drafting(folder: Path, draft: Path, *, with_noise: bool = False, **options: Any) -> LLM:
    config = drafts_by(draft, draft_sample_method="probabilistic" if with_noise else "greedy")
    return load(folder, speculative_config=config, **{**SIZES, **options})


def texts(llm: LLM, max_tokens: int = 14) -> list[list[int]]:
    """The answers to `TEXTS`, every second of which is sampled."""
    params = [
        SamplingParams(temperature=0.9 * (place % 2), seed=place, max_tokens=max_tokens, ignore_eos=True)
        for place in range(len(TEXTS))
    ]
    prompts = [{"prompt_token_ids": text} for text in TEXTS]
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]


def speculation(llm: LLM) -> SpeculationStats:
    found = llm.engine.stats.speculation
    assert found is not None
    return found


@pytest.fixture(scope="module")
def expected(llama_dir: Path) -> tuple[list[RequestOutput], list[list[int]]]:
    with load(llama_dir, **SIZES) as llm:
        return answers(llm), texts(llm)


@STEPS
def test_answers_are_those_without_drafts(
    llama_dir: Path, half: Path, expected: tuple[list[RequestOutput], list[list[int]]], is_ahead: bool
) -> None:
    """Chunks, priorities, prefixes, n, stops, log probabilities and requests that draft less, over graphs and none."""
    with drafting(llama_dir, half, async_scheduling=is_ahead) as llm:
        execute, drafter = llm.runner.execute_model, drafter_of(llm)
        assert drafter.captured_sizes == (1, 2, 4, 6)
        assert_same(answers(llm), expected[0])
        assert drafter.num_replays > 0 and drafter.num_uncaptured == 0
        llm.runner.execute_model = lambda output: execute(output, at_most=NONE)  # type: ignore[method-assign, misc, assignment]
        assert_same(answers(llm), expected[0])
        llm.runner.execute_model = execute  # type: ignore[method-assign]
        stats = llm.engine.stats
        assert 0 < speculation(llm).num_accepted_tokens < speculation(llm).num_draft_tokens
        assert stats.num_free_blocks == stats.num_blocks, "blocks leaked"


@STEPS
@pytest.mark.parametrize("num_kv_blocks", [64, 17], ids=["blocks for all", "requests give way"])
def test_a_model_accepts_all_that_it_drafts_for_itself(
    llama_dir: Path, expected: tuple[list[RequestOutput], list[list[int]]], is_ahead: bool, num_kv_blocks: int
) -> None:
    """Greedy and, by the noise that both draw with, sampled: also behind chunks, cached prefixes and preemptions."""
    with drafting(llama_dir, llama_dir, with_noise=True, async_scheduling=is_ahead, num_kv_blocks=num_kv_blocks) as llm:
        assert [texts(llm), texts(llm)] == [expected[1]] * 2
        found, stats = speculation(llm), llm.engine.stats
    assert found.acceptance_rate == 1.0, found
    assert found.num_accepted_by_position[-1] > 20, found
    assert stats.num_prefix_hits > 0
    assert (stats.num_preemptions > 0) is (num_kv_blocks == 17)


def test_by_torchs_attention_all_is_accepted_too(
    llama_dir: Path, expected: tuple[list[RequestOutput], list[list[int]]]
) -> None:
    """As on a CPU by default: no graphs, and lengths that are planned on the host."""
    with drafting(llama_dir, llama_dir, attention_backend="sdpa", graph_kind="auto") as llm:
        assert texts(llm) == expected[1]
        assert drafter_of(llm).captured_sizes == () and drafter_of(llm).num_uncaptured > 0
        before = speculation(llm)
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        (one,) = llm.generate([{"prompt_token_ids": SHARED[:24]}], params, use_tqdm=False)
        after = speculation(llm)
    assert len(one.outputs[0].token_ids) == 20
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    assert after.num_draft_tokens - before.num_draft_tokens == num_accepted > 12


@STEPS
def test_a_text_ends_at_the_longest_length(llama_dir: Path, is_ahead: bool) -> None:
    """Nothing is drafted behind it, and the last place is filled."""
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    found = []
    for options in ({}, {"speculative_config": drafts_by(llama_dir), "async_scheduling": is_ahead}):
        with load(llama_dir, **{**SIZES, "max_model_len": 30}, **options) as llm:
            outputs = llm.generate([{"prompt_token_ids": SHARED[:n]} for n in (1, 22, 29)], params, use_tqdm=False)
            found.append([list(one.outputs[0].token_ids) for one in outputs])
            if options:
                assert speculation(llm).acceptance_rate == 1.0
    assert found[0] == found[1] and [len(one) for one in found[0]] == [29, 8, 1]


def assert_two_graphs_and_one_copy(llm: LLM) -> None:
    """Of a step in which requests decode, with nothing staged unless a block was added."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    engine = llm.engine
    for i in range(2):
        engine.add_request(str(i), [4 + i] * 17, params, is_final_only=True)
    for _ in range(4):
        engine.step()
    num_counted = 0
    while engine.has_unfinished and num_counted < 4:
        with counted() as counts:
            engine.step()
        if counts.staged_writes or counts.graphs != 2:
            continue  # a block was added, or the last step in flight was waited for
        num_counted += 1
        assert counts.writes == {"aten.copy_.default": 1} and not counts.allocations and not counts.host_bytes
    assert num_counted == 4
    assert drafter_of(llm).num_uncaptured == 0
    for i in range(2):
        engine.abort(str(i))
    engine.step()


def test_a_verification_is_one_graph_and_its_drafts_another(llama_dir: Path, half: Path) -> None:
    """With one copy of tokens to the host."""
    with drafting(llama_dir, half, async_scheduling=True, block_size=16, max_model_len=96) as llm:
        assert_two_graphs_and_one_copy(llm)


def test_a_closed_drafter_has_no_graphs(llama_dir: Path, half: Path) -> None:
    llm = drafting(llama_dir, half)
    drafter = drafter_of(llm)
    assert drafter.captured_sizes and draft_descriptor(2).num_tokens == 4
    llm.close()
    assert drafter.captured_sizes == ()


@pytest.mark.gpu
@STEPS
def test_cuda_graphs_draft_the_same(llama_dir: Path, half: Path, is_ahead: bool) -> None:
    """By our kernels: the first pass by those for prompts, the others by those for decode."""
    with load(llama_dir, device="cuda", **SIZES) as llm:
        plain = texts(llm)
    for draft in (half, llama_dir):
        with drafting(llama_dir, draft, with_noise=True, device="cuda", async_scheduling=is_ahead) as llm:
            assert texts(llm) == plain
            torch.cuda.synchronize()
            assert drafter_of(llm).num_replays > 0 and drafter_of(llm).captured_sizes
            if draft == llama_dir:
                rate = speculation(llm).acceptance_rate
                assert rate is not None and rate > 0.95, "kernels differ in rounding, so two tokens may nearly tie"


@pytest.mark.slow
def test_the_embedded_model_drafts_for_itself_and_half_of_it_for_it(tmp_path: Path) -> None:
    """All of the first's drafts are accepted, but for logits that nearly tie; both give the very text."""
    from transformers import AutoModelForCausalLM

    from piecegraph.runner.models.embedded_model import embedded_model_dir

    folder = Path(embedded_model_dir())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first_half = save_first_layers(model, model.config.num_hidden_layers // 2, tmp_path, folder)
    prompts = ["The capital of France is", "Repeat after me: one two three, one two three,", "def add(a, b):\n    "]
    params = SamplingParams(temperature=0.0, max_tokens=32)
    options: dict[str, Any] = {"compiler": "eager", "max_model_len": 256, "max_num_seqs": 4, "dtype": "float32"}
    with LLM(folder, **options) as llm:
        plain = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]
    for draft in (folder, first_half):
        with LLM(folder, speculative_config=drafts_by(draft), **options) as llm:
            found = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]
            stats = speculation(llm)
        assert found == plain
        if draft == folder:
            assert stats.num_wasted_tokens <= NUM_DRAFTS and stats.num_accepted_tokens > 40, stats
