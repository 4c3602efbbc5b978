"""Rung L1 of the exactness ladder on real shapes, compiled by Inductor: a replay gives the bits that the same
pieces give without graphs, at every size that is captured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import LLM
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.cudagraphs.capture_sizes import SMALL_MIXED_SIZES, SMALL_SIZES, default_capture_sizes
from piecegraph.runner.cudagraphs.dispatcher import Dispatched
from piecegraph.tools.command_line.shapes import SHAPES
from tests.runner.test_graphs import FULL, NONE, PIECEWISE, decoding, generate, restore, snapshot, without_graphs

SMOLLM2: dict[str, Any] = {
    **SHAPES["llama-8b"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["qwen3-0.6b", "smollm2-135m"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Random bfloat16 weights, all default sizes up to 2048 tokens."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    config = SHAPES.get(request.param, SMOLLM2)
    (folder / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 2**30}
    with LLM(folder, load_format="dummy", skip_tokenizer_init=True, compile_sizes=[1], **options) as llm:
        yield llm


@pytest.mark.parametrize("mode", [FULL, PIECEWISE], ids=["FULL", "PIECEWISE"])
@torch.no_grad()
def test_a_replay_is_bitwise_the_pieces_at_every_size(real: LLM, mode: CUDAGraphMode) -> None:
    runner, batch = decoding(real, 1)
    saved = snapshot(runner)
    descriptors = runner.graphs.descriptors(mode)
    captured = default_capture_sizes(2048, SMALL_MIXED_SIZES if mode is PIECEWISE else SMALL_SIZES)
    assert {each.num_tokens for each in descriptors} == {n for n in captured if mode is PIECEWISE or n <= 256}
    for descriptor in descriptors:
        expected = without_graphs(runner, batch, descriptor)[:1].clone()
        restore(runner, saved)
        found = runner.run(batch, Dispatched(mode, descriptor, None)).logits[:1].clone()
        restore(runner, saved)
        assert torch.equal(found, expected), descriptor
    real.engine.abort("r0")


def test_full_and_piecewise_give_the_same_tokens(real: LLM) -> None:
    """16 requests have the same pieces at one padded shape in both; NONE runs another, so near ties may differ."""
    assert generate(real, FULL, 4) == generate(real, PIECEWISE, 4)
    assert [len(tokens) for tokens in generate(real, NONE)] == [8, 8, 8, 8]
