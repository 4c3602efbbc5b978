"""`LLM.embed`, `classify` and `score` give what transformers computes for one text at a time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

from piecegraph import LLM, PoolingParams, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError, RequestError, UnsupportedModel, UsageError
from tests.runner.pooling.encoder_models import (
    DECODERS,
    FAMILIES,
    MAX_LEN,
    hidden_states,
    logits,
    pair_tokenizer,
    save_model,
    texts,
)

RAW = PoolingParams(normalize=False)
LOGITS = PoolingParams(use_activation=False)
FAST = ("modernbert-mean", "qwen3", "bloom")
"""Families of the fast suite, beside BERT: windows, a decoder, and one with attention modules of its own."""


def assert_close(found: Any, wanted: torch.Tensor, tolerance: float = 2e-5) -> None:
    """Compare numbers with those of transformers, whose matrix products have other shapes."""
    torch.testing.assert_close(torch.as_tensor(found), wanted, atol=tolerance, rtol=tolerance)


def load_small(folder: Path) -> LLM:
    """A model that pools; some configs have no length of their own."""
    return LLM(folder, runner="pooling", device="cpu", compiler="eager", max_num_seqs=4, max_model_len=MAX_LEN - 2)


def _families() -> list[Any]:
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES]


@pytest.mark.parametrize("name", _families())
def test_embeddings_are_the_rows_of_transformers(name: str, tmp_path: Path) -> None:
    """The last token's row of a decoder, the first one's of an encoder; several texts share a step."""
    model = save_model(FAMILIES[name](), tmp_path)
    prompts = texts(6)
    with LLM(
        tmp_path, runner="pooling", device="cpu", compiler="eager", max_num_seqs=4, max_model_len=MAX_LEN - 2
    ) as llm:
        outputs = llm.embed(prompts, pooling_params=RAW, use_tqdm=False)
        assert llm.compiled.report().num_unique_pieces <= 4
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == pair_tokenizer()(prompt)["input_ids"]
        row = hidden_states(model, output.prompt_token_ids)[-1 if name in DECODERS else 0]
        assert_close(output.outputs.embedding, row)


def test_padding_tokens_within_a_text_have_no_position_of_their_own(tmp_path: Path) -> None:
    """RoBERTa counts the tokens that are none; beside a text without them, and alone."""
    model = save_model(FAMILIES["roberta"](), tmp_path)
    prompts = [[0, 1, 5, 1, 2], [2, 4, 3], [1], [5, 9, 9, 1, 1, 7]]
    with load_small(tmp_path) as llm:
        outputs = llm.embed(prompts, pooling_params=RAW, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_close(output.outputs.embedding, hidden_states(model, prompt)[0])


@pytest.mark.parametrize("name", [each for each in _families() if "bidirectional" not in each.values[0]])
def test_classes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_model(FAMILIES[name](), tmp_path, num_labels=3)
    prompts = texts(5, seed=1)
    with LLM(
        tmp_path, device="cpu", compiler="eager", max_num_seqs=4, runner="pooling", max_model_len=MAX_LEN - 2
    ) as llm:
        outputs = llm.classify(prompts, use_tqdm=False)
        raw = llm.classify(prompts, LOGITS, use_tqdm=False)
    for output, unscaled in zip(outputs, raw, strict=True):
        wanted = logits(model, {"input_ids": output.prompt_token_ids})
        assert_close(unscaled.outputs.probs, wanted)
        assert_close(output.outputs.probs, wanted.softmax(-1))
        assert output.outputs.num_classes == 3


def test_vectors_have_length_one_unless_asked_otherwise(bert: LLM, bert_dir: tuple[Path, Any]) -> None:
    (raw,) = bert.embed("the quick brown fox", pooling_params=RAW)
    row = hidden_states(bert_dir[1], raw.prompt_token_ids)[0]
    assert_close(raw.outputs.embedding, row)
    (scaled,) = bert.embed("the quick brown fox")
    assert scaled.outputs.hidden_size == 32
    torch.testing.assert_close(
        torch.tensor(scaled.outputs.embedding), normalize(torch.tensor(raw.outputs.embedding), dim=0)
    )
    (encoded,) = bert.encode("the quick brown fox", pooling_task="embed")
    assert encoded.outputs.data.tolist() == scaled.outputs.embedding


def test_each_token_has_an_embedding_if_asked(bert: LLM, bert_dir: tuple[Path, Any]) -> None:
    """The rows of all tokens, special ones included; texts share steps, and other requests are not changed."""
    prompts = texts(6)
    raw = bert.encode(prompts, RAW, pooling_task="token_embed", use_tqdm=False)
    for output in raw:
        assert_close(output.outputs.data, hidden_states(bert_dir[1], output.prompt_token_ids))
    (cut,) = bert.encode(prompts[0], pooling_task="token_embed")
    assert_close(cut.outputs.data, normalize(raw[0].outputs.data, dim=-1))
    (plain,) = bert.embed(prompts[0], pooling_params=RAW)
    assert_close(plain.outputs.embedding, raw[0].outputs.data[0])


def test_classes_of_tokens_are_refused(bert: LLM, cross_encoder: LLM) -> None:
    with pytest.raises(RequestError, match="pooling_task='token_classify'; it may be 'embed', 'classify', 'token_e"):
        bert.encode("a", pooling_task="token_classify")
    with pytest.raises(UnsupportedModel, match="pooling_task='token_embed' needs embeddings"):
        cross_encoder.encode("a", pooling_task="token_embed")


def test_a_cross_encoder_reads_both_texts(cross_encoder: LLM, cross_encoder_dir: tuple[Path, Any]) -> None:
    """Scores are the sigmoid of transformers' logits over the pair, with the second text's token types."""
    first, second = texts(3, seed=2), texts(3, seed=3)
    tokenizer = pair_tokenizer()
    wanted = [
        logits(cross_encoder_dir[1], tokenizer(a, b)).sigmoid().item() for a, b in zip(first, second, strict=True)
    ]
    outputs = cross_encoder.score(first, second)
    assert [output.outputs.score for output in outputs] == pytest.approx(wanted, abs=1e-5)
    assert outputs[0].prompt_token_ids == tokenizer(first[0], second[0])["input_ids"]
    one_to_many = cross_encoder.score(first[0], second)
    assert one_to_many[0].outputs.score == pytest.approx(wanted[0], abs=1e-5)
    assert len(one_to_many) == 3


def test_an_embedding_model_scores_by_cosine(bert: LLM) -> None:
    first, second = texts(2, seed=4), texts(2, seed=5)
    a, b = (torch.tensor([one.outputs.embedding for one in bert.embed(each)]) for each in (first, second))
    scores = [output.outputs.score for output in bert.score(first, second)]
    assert scores == pytest.approx(cosine_similarity(a, b).tolist(), abs=1e-6)


def test_graphs_give_the_same_vectors(bert: LLM, bert_dir: tuple[Path, Any]) -> None:
    """PIECEWISE graphs, recorded on a CPU, of padded batches; pooling is part of them."""
    prompts = texts(9, seed=6)
    with LLM(
        bert_dir[0],
        device="cpu",
        compiler="eager",
        max_num_seqs=4,
        graph_kind="recorded",
        cudagraph_capture_sizes=[8, 32, 128],
    ) as llm:
        replayed = llm.embed(prompts, pooling_params=RAW)
        counted = llm._pooler.runner.counters.by_mode()
    assert set(counted) == {CUDAGraphMode.PIECEWISE}
    plain = bert.embed(prompts, pooling_params=RAW)
    for a, b in zip(replayed, plain, strict=True):
        assert_close(a.outputs.embedding, torch.tensor(b.outputs.embedding))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_inductor_gives_the_same_vectors(name: str, tmp_path: Path) -> None:
    model = save_model(FAMILIES[name](), tmp_path)
    prompts = texts(6)
    with LLM(tmp_path, runner="pooling", device="cpu", max_num_seqs=4) as llm:
        outputs = llm.embed(prompts, pooling_params=RAW)
        assert llm.compiled.report().num_unique_pieces == 3
    for output in outputs:
        row = hidden_states(model, output.prompt_token_ids)[-1 if name in DECODERS else 0]
        assert_close(output.outputs.embedding, row, 1e-4)


def test_bad_requests_are_refused_before_any_runs(bert: LLM) -> None:
    long = "cat " * MAX_LEN
    with pytest.raises(RequestError, match=f"has {MAX_LEN + 2} tokens, and the model takes at most {MAX_LEN}"):
        bert.embed(["a cat", long])
    (cut,) = bert.embed(long, pooling_params=PoolingParams(truncate_prompt_tokens=-1))
    assert (len(cut.prompt_token_ids), cut.prompt_token_ids[-1]) == (MAX_LEN, 3)  # [SEP] is kept
    with pytest.raises(RequestError, match=r"truncate_prompt_tokens=1, and the tokenizer adds 2 .*; give 3 or more"):
        bert.embed("a cat runs", pooling_params=PoolingParams(truncate_prompt_tokens=1))
    with pytest.raises(RequestError, match="the prompt is empty"):
        bert.embed("")
    with pytest.raises(RequestError, match="has no tokens"):
        bert.embed({"prompt_token_ids": []})
    with pytest.raises(RequestError, match="token id 64 is not in the vocabulary"):
        bert.embed([[2, 64, 3]])
    with pytest.raises(RequestError, match=r"does not say that it is a Matryoshka model.*hf_overrides"):
        bert.embed("a cat", pooling_params=PoolingParams(dimensions=8))
    with pytest.raises(RequestError, match="use_activation=True has no meaning for 'embed'"):
        bert.embed("a cat", pooling_params=PoolingParams(use_activation=True))
    with pytest.raises(RequestError, match="2 prompts, but 1 pooling_params"):
        bert.embed(["a cat", "a dog"], pooling_params=[RAW])
    with pytest.raises(RequestError, match="truncate_prompt_tokens is for texts"):
        bert.embed([[2, 5, 3]], pooling_params=PoolingParams(truncate_prompt_tokens=2))
    with pytest.raises(RequestError, match="data_1 has 2 texts and data_2 has 3"):
        bert.score(["a", "the"], ["a", "the", "cat"])
    with pytest.raises(RequestError, match="pooling_task='plugin'"):
        bert.encode("a", pooling_task="plugin")


def test_what_a_model_cannot_do_is_said(bert: LLM, cross_encoder: LLM, llm: LLM) -> None:
    with pytest.raises(UnsupportedModel, match="classify needs a model with a head for classification"):
        bert.classify("a cat")
    with pytest.raises(UnsupportedModel, match="embed needs embeddings, and this model was loaded as a classifier"):
        cross_encoder.embed("a cat")
    with pytest.raises(UsageError, match=r"this LLM pools: .* make an LLM with runner='generate'"):
        bert.generate("a cat", SamplingParams())
    with pytest.raises(UsageError, match=r"this LLM generates: .* make an LLM with runner='pooling'"):
        llm.embed("a cat")


def test_an_encoder_does_not_generate(bert_dir: tuple[Path, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"BertLMHeadModel is an encoder by its config.*runner='pooling'"):
        LLM(bert_dir[0], runner="generate", device="cpu", compiler="eager")


def test_a_checkpoint_without_a_head_is_no_classifier(bert_dir: tuple[Path, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="names the architecture 'BertModel', which has no classifier"):
        LLM(bert_dir[0], convert="classify", device="cpu", compiler="eager")


def test_matryoshka_dimensions(bert_dir: tuple[Path, Any], tmp_path: Path) -> None:
    """An embedding is cut, then scaled."""
    folder = shutil.copytree(bert_dir[0], tmp_path / "bert")
    overrides = {"matryoshka_dimensions": [8, 16]}
    with LLM(folder, device="cpu", compiler="eager", hf_overrides=overrides) as llm:
        (whole,), (cut,) = (llm.embed("a cat", pooling_params=PoolingParams(dimensions=n)) for n in (None, 8))
        with pytest.raises(RequestError, match="dimensions=9; the model was trained for 8, 16"):
            llm.embed("a cat", pooling_params=PoolingParams(dimensions=9))
    wanted = normalize(torch.tensor(whole.outputs.embedding)[:8], dim=0)
    torch.testing.assert_close(torch.tensor(cut.outputs.embedding), wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_blocks": 8}, "num_kv_blocks=8 is for generation"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds=True is for generation"),
        ({"attention_backend": "triton"}, "attention_backend='triton' attends over a key/value cache"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 2}, "is less than max_model_len=64"),
        ({"runner": "draft"}, "runner='draft' is unknown"),
        ({"convert": "reward"}, "convert='reward' is unknown"),
    ],
)
def test_options_that_do_not_fit_are_refused(bert_dir: tuple[Path, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(bert_dir[0], device="cpu", compiler="eager", **options)
