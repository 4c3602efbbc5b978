"""Answers with an EAGLE-3 head are those without, whatever it drafts; and its drafts are those of its own definition,
computed over the whole text at once, which shows that its keys and the hidden states are those of the right tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import RequestOutput, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.speculative.heads.head_step import HeadStep
from tests.runner.speculative.drafting_llm import FEW, SIZES, answers, assert_same
from tests.runner.speculative.heads.random_heads import (
    NUM_DRAFTS,
    drafts_by_head,
    eagle3_checkpoint,
    save_eagle3,
    save_head,
    save_small_head,
)
from tests.runner.speculative.test_drafter import (
    assert_two_graphs_and_one_copy,
    drafter_of,
    speculation,
    texts,
)
from tests.runner.test_graphs import load
from tests.runner.tiny_models import FAMILIES, random_model, save

NONE = CUDAGraphMode.NONE
SLOW_IF_AWAITED = pytest.mark.parametrize(
    "is_ahead",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["each step awaited", "a step ahead"],
)
PLACES = (0, 1, 2)
"""The hidden states that the heads read."""


random = Random(2)
TEXT = [random.randrange(3, 260) for _ in range(32)]


@pytest.fixture(scope="module")
def head_dir(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that shares the model's embedding and logits."""
    return save_eagle3(llama, tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def small_head_dir(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of three tokens, the only ones that most of the answers may have."""
    return save_small_head(llama, tmp_path_factory.mktemp("small"), FEW)


@pytest.fixture(scope="module")
def expected(llama_dir: Path) -> tuple[list[RequestOutput], list[list[int]]]:
    with load(llama_dir, **SIZES) as llm:
        return answers(llm), texts(llm)


@SLOW_IF_AWAITED
def test_answers_are_those_without_drafts(
    llama_dir: Path, small_head_dir: Path, expected: tuple[list[RequestOutput], list[list[int]]], is_ahead: bool
) -> None:
    """Chunks, priorities, prefixes, n, stops, log probabilities and requests that draft less, over graphs and none."""
    config = drafts_by_head(small_head_dir)
    with load(llama_dir, speculative_config=config, async_scheduling=is_ahead, **SIZES) as llm:
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


@torch.no_grad()
def states_of(model: PreTrainedModel, text: list[int]) -> torch.Tensor:
    """The hidden states at `PLACES`, side by side, before the last norm."""
    found: list[torch.Tensor] = []
    layers: Any = model.base_model.layers
    hooks = [layers[0].register_forward_pre_hook(lambda _, args: found.append(args[0]))]
    hooks += [layer.register_forward_hook(lambda _, args, result: found.append(result)) for layer in layers]
    try:
        model(input_ids=torch.tensor([text]))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([found[place] for place in PLACES], dim=-1)[0]


@torch.no_grad()
def drafts_of_whole_text(head: Any, states: torch.Tensor, ids: torch.Tensor | None, text: list[int]) -> list[int]:
    """What a head drafts behind `text`, whose last token no model has read, by torch's attention over all of it.

    `head` has torch's attention; `states` are the model's, and `ids` the model's tokens of the head's.
    """
    hidden = head.joined(states)
    tokens, found = text[1:], []
    for _ in range(NUM_DRAFTS):
        positions = torch.arange(len(tokens))
        logits, last = head(torch.tensor(tokens), positions, hidden, torch.tensor([len(tokens) - 1]))
        best = int(logits.argmax())
        found.append(best if ids is None else int(ids[best]))
        tokens, hidden = [*tokens, found[-1]], torch.cat([hidden, last])
    return found


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"attention_backend": "sdpa", "graph_kind": "auto"}, marks=pytest.mark.slow)],
    ids=["graphs", "none"],
)
@pytest.mark.parametrize("is_small", [False, True], ids=["the model's tokens", "three tokens"])
def test_drafts_are_those_of_the_whole_text(
    llama: PreTrainedModel,
    llama_dir: Path,
    head_dir: Path,
    small_head_dir: Path,
    is_small: bool,
    options: dict[str, Any],
) -> None:
    """Behind prompts in chunks, a cached prefix, rejected and accepted drafts, a preemption, and near the end.

    No cached prefix ends with a prompt here: what follows its last key would differ, see Note [a head reads one token
    ahead].
    """
    config = drafts_by_head(small_head_dir if is_small else head_dir)
    with load(llama_dir, speculative_config=config, **{**SIZES, "num_kv_blocks": 21, **options}) as llm:
        step = drafter_of(llm).step
        assert isinstance(step, HeadStep)
        alone = copy.deepcopy(step.head)
        alone.config._attn_implementation = "sdpa"
        engine, num_compared = llm.engine, 0
        prompts = [TEXT[:21], [5], TEXT[:6], TEXT[:25], TEXT[3:29], [9, 10]]
        params = SamplingParams(
            temperature=0.0, max_tokens=14, ignore_eos=True, allowed_token_ids=FEW if is_small else None
        )
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
        while engine.has_unfinished:
            engine.step()
            running = [one for one in engine.requests.values() if one.request_id in step.target.states]
            for request in [one for one in running if one.num_ready_drafts]:
                found = llm.runner.proposed([request.request_id])[request.request_id]  # type: ignore[attr-defined]
                text = [*prompts[int(request.request_id)], *request.output_token_ids]
                assert (
                    found
                    == drafts_of_whole_text(alone, states_of(llama, text[:-1]), step.target_ids, text)[: len(found)]
                )
                num_compared += len(found)
        stats, num_accepted = engine.stats, speculation(llm).num_accepted_tokens
    assert num_compared > 60
    assert stats.num_preemptions > 0 and stats.num_prefix_hits > 0
    assert num_accepted > 5 or not is_small


def test_a_verification_is_one_graph_and_its_drafts_another(llama_dir: Path, head_dir: Path) -> None:
    """The hidden states are kept in the first; one copy of tokens goes to the host."""
    options = {**SIZES, "block_size": 16, "max_model_len": 96}
    with load(llama_dir, speculative_config=drafts_by_head(head_dir), async_scheduling=True, **options) as llm:
        assert_two_graphs_and_one_copy(llm)


@SLOW_IF_AWAITED
def test_a_text_ends_at_the_longest_length(llama_dir: Path, small_head_dir: Path, is_ahead: bool) -> None:
    """By drafts that are drawn with the model's noise, of another number for each request."""
    found = []
    config = drafts_by_head(small_head_dir, draft_sample_method="probabilistic", num_speculative_tokens=5)
    for options in ({}, {"speculative_config": config, "async_scheduling": is_ahead}):
        with load(llama_dir, **{**SIZES, "max_model_len": 30}, **options) as llm:
            params = [
                SamplingParams(
                    max_tokens=None,
                    ignore_eos=True,
                    seed=place,
                    allowed_token_ids=FEW,
                    n=2,
                    extra_args={"num_speculative_tokens": count} if options else None,
                )
                for place, count in enumerate((5, 3, 1, 0))
            ]
            prompts = [{"prompt_token_ids": TEXT[:count]} for count in (1, 22, 29, 4)]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([list(one.token_ids) for output in outputs for one in output.outputs])
            if options:
                assert 5 < speculation(llm).num_accepted_tokens < speculation(llm).num_draft_tokens
    assert found[0] == found[1] and [len(one) for one in found[0]] == [29, 29, 8, 8, 1, 1, 26, 26]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_drafts", "head"),
    [
        ("llama", 7, {}),
        (
            "llama",
            1,
            {
                "kind": "qwen3",
                "norm_before_fc": True,
                "fc_norm": True,
                "norm_output": True,
                "layer": {"num_hidden_layers": 2},
            },
        ),
        ("mistral", 3, {"target_hidden_size": 32, "layer": {"hidden_size": 16}}),
    ],
    ids=["more drafts than a block has tokens", "all norms, two layers, one draft", "windows alone, a smaller head"],
)
def test_heads_of_other_kinds_draft(tmp_path: Path, family: str, num_drafts: int, head: dict[str, Any]) -> None:
    """Over graphs, a step ahead, where requests give way."""
    model = random_model(FAMILIES[family]())
    config, tensors = eagle3_checkpoint(model, draft_vocab=len(FEW), **head)
    tensors["d2t"] = torch.tensor(FEW) - torch.arange(len(FEW))
    folder, head_dir = save(model, tmp_path / "model"), save_head(tmp_path / "head", config, tensors)
    prompts = [{"prompt_token_ids": [token % 120 + 3 for token in TEXT[:count]]} for count in (1, 22, 9, 24, 30, 13)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=14, ignore_eos=True, allowed_token_ids=FEW)
        for i in range(len(prompts))
    ]
    found = []
    drafts = drafts_by_head(head_dir, num_speculative_tokens=num_drafts)
    for options in ({"num_kv_blocks": 96}, {"speculative_config": drafts, "async_scheduling": True}):
        with load(folder, **{**SIZES, "num_kv_blocks": 34, **options}) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([list(one.outputs[0].token_ids) for one in outputs])
            if "speculative_config" in options:
                assert speculation(llm).num_accepted_tokens > 5
    assert found[0] == found[1]
