"""Prompts that arrive together and begin alike share blocks that are written in the very step that reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.runner.margin_rule import assert_same_tokens
from tests.runner.test_graphs import GREEDY, load


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_more", [1, 3], ids=["one token of its own", "three tokens of its own"])
def test_a_prompt_reads_the_prefix_that_an_earlier_one_wrote(
    llama_dir: Path, llama: PreTrainedModel, device: str, num_more: int
) -> None:
    """A prompt with one token left is a decode, which attends before the chunks of other prompts."""
    prompts = [[*range(10, 18), *range(30 + i, 30 + i + num_more)] for i in range(4)]
    with load(llama_dir, device=device, block_size=4, max_num_batched_tokens=24, num_kv_blocks=64) as llm:
        for i, prompt in enumerate(prompts):
            llm.engine.add_request(f"r{i}", prompt, GREEDY, is_final_only=True)
        tokens = {}
        while llm.engine.has_unfinished:
            tokens.update({one.request_id: one.outputs[0].token_ids for one in llm.engine.step()})
        assert llm.engine.stats.num_prefix_hits == 3 * 8
    for i, prompt in enumerate(prompts):
        assert_same_tokens(llama, prompt, tokens[f"r{i}"])
