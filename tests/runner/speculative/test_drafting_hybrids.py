"""Models with states draft by prompt lookup or with a draft model: states go back to the last accepted token, and no
token shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.errors import UnsupportedModel
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.speculative.draft_models import drafts_by
from tests.runner.speculative.drafting_llm import FEW, SIZES, answers, assert_same, drafting
from tests.runner.test_graphs import load
from tests.runner.test_hybrid_models import GREEDY, PROMPTS, manager
from tests.runner.tiny_models import make_config, make_model, random_model, save

UNCAPTURED: dict[str, Any] = {"attention_backend": "sdpa", "cudagraph_mode": "NONE"}
MIXES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "ahead": {"async_scheduling": True},
    "on the host": UNCAPTURED,
    "one slot": {**UNCAPTURED, "enable_prefix_caching": False},
}
"""How steps run: recorded graphs that read their plans from buffers, awaited or not; plans of the host."""
RUNS = [
    ("qwen3.5", "graphs"),
    *[
        pytest.param(name, mix, marks=pytest.mark.slow)
        for name, mix in (("jamba", "one slot"), ("lfm2", "graphs"), ("jamba", "ahead"), ("bamba", "on the host"))
    ],
]


@pytest.mark.parametrize(("name", "mix"), RUNS)
def test_answers_are_those_without_drafts(name: str, mix: str, tmp_path: Path) -> None:
    """Greedy ones are transformers', too. Twice: prefixes are cached the second time, up to the first rejected draft.

    Blocks hold 4 tokens and a step verifies 3 drafts, so that drafts cross block boundaries; few blocks make requests
    preempt each other.
    """
    model = make_model(name)
    folder, options = save(model, tmp_path), {"num_kv_blocks": 70, **MIXES[mix]}
    with load(folder, **{**SIZES, **options}) as llm:
        expected = answers(llm)
    with drafting(folder, **options) as llm:
        for _ in range(2):
            assert_same(answers(llm), expected)
            check(model, llm)
        stats = llm.engine.stats
        assert stats.speculation is not None
        assert 0 < stats.speculation.num_accepted_tokens < stats.speculation.num_draft_tokens
        assert (stats.num_prefix_hits > 0) is (mix != "one slot")
        assert manager(llm).num_free_blocks == manager(llm).num_blocks
        assert not llm.runner.graphs.failed()


def check(model: PreTrainedModel, llm: LLM) -> None:
    """The answers to prompts in chunks and of one token are those of transformers."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)


def test_preempted_requests_draft(tmp_path: Path) -> None:
    """A request that comes back reads the state of its last cached block, and decodes from there on."""
    model = make_model("qwen3.5")
    few: dict[str, Any] = {"num_kv_blocks": 30, "max_num_batched_tokens": 8, "cudagraph_capture_sizes": None}
    with drafting(save(model, tmp_path), **UNCAPTURED, **few) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert_same_tokens(model, prompt, output.outputs[0].token_ids)
        assert llm.engine.stats.num_preemptions > 0
        assert llm.engine.stats.speculation.num_accepted_tokens > 0  # type: ignore[union-attr]  # it drafts


def draft_for(folder: Path) -> dict[str, Any]:
    """`speculative_config` with a small Llama of the same vocabulary, saved in `folder`, that drafts few tokens."""
    draft = random_model(make_config("LlamaConfig"), seed=3)
    weights = draft.get_output_embeddings().weight.data
    weights[[token for token in range(weights.shape[0]) if token not in FEW]] = 0.0
    return drafts_by(save(draft, folder))


DRAFT_RUNS = [
    ("qwen3.5", "graphs"),
    *[
        pytest.param(name, mix, marks=pytest.mark.slow)
        for name, mix in (("jamba", "ahead"), ("mamba2", "on the host"), ("bamba", "one slot"))
    ],
]


@pytest.mark.parametrize(("name", "mix"), DRAFT_RUNS)
def test_answers_are_those_without_a_draft_model(name: str, mix: str, tmp_path: Path) -> None:
    """The draft's keys lie in tensors beside the pages that the model's layers share; mamba2 has no block table that
    keeps all tokens, so the draft has one of its own."""
    model = make_model(name)
    folder, options = save(model, tmp_path / "model"), {"num_kv_blocks": 70, **MIXES[mix]}
    with load(folder, **{**SIZES, **options}) as llm:
        expected = answers(llm)
    with load(folder, **{**SIZES, **options}, speculative_config=draft_for(tmp_path / "draft")) as llm:
        for _ in range(2):
            assert_same(answers(llm), expected)
            check(model, llm)
        stats = llm.engine.stats
        assert stats.speculation is not None
        assert 0 < stats.speculation.num_accepted_tokens < stats.speculation.num_draft_tokens
        assert (stats.num_prefix_hits > 0) is (mix != "one slot")
        assert manager(llm).num_free_blocks == manager(llm).num_blocks
        assert not llm.runner.graphs.failed()
        assert len(manager(llm).groups) == (2 if name == "mamba2" else 5 if name == "jamba" else 3)


def test_a_draft_that_keeps_states_is_refused(tmp_path: Path) -> None:
    """The layer is named, and what it would need."""
    hybrid, llama = make_model("qwen3.5"), random_model(make_config("LlamaConfig"))
    config = drafts_by(save(hybrid, tmp_path / "draft"))
    wanted = (
        r"keeps a state between tokens \(model\.layers\.0\.linear_attn\)\. .* would need to be taken back each time"
    )
    with pytest.raises(UnsupportedModel, match=wanted):
        load(save(llama, tmp_path / "model"), speculative_config=config)
