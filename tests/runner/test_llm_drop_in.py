"""Calls as scripts write them for vLLM run unchanged, with the same meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from piecegraph import LLM, SamplingParams
from piecegraph.errors import RequestError, UsageError

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_prompts_in_every_form(llm: LLM) -> None:
    """One prompt or several, as text or tokens, also mixed, give the same answer."""
    ids = llm.get_tokenizer()("the first")["input_ids"]
    (alone,) = llm.generate({"prompt": "the first"}, GREEDY)
    assert alone.prompt == "the first"
    several = llm.generate(["the first", ids, {"prompt_token_ids": np.array(ids)}, torch.tensor(ids)], GREEDY)
    for output in (*several, *llm.generate(ids, GREEDY), *llm.generate([ids], GREEDY), *llm.generate(ids, GREEDY)):
        assert output.outputs == alone.outputs
        assert output.prompt_token_ids == ids
    assert llm.generate([], GREEDY) == []


def test_a_priority_orders_the_queue(llm: LLM) -> None:
    """A lower one goes first, whatever the order of the prompts: the last of 17 is in the first batch of 8."""
    finished = [
        output.request_id for output in llm.stream(["a"] * 17, GREEDY, priority=[1] * 16 + [0]) if output.finished
    ]
    first = {int(request_id) for request_id in finished[:8]}
    assert max(map(int, finished)) in first
    with pytest.raises(RequestError, match="2 prompts, but 1 priorities"):
        llm.generate(["a", "b"], GREEDY, priority=[1])


def test_a_progress_bar_of_the_callers(llm: LLM) -> None:
    made: list[Any] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            self.options, self.count, self.is_closed = options, 0, False
            made.append(self)

        def update(self, count: int) -> None:
            self.count += count

        def close(self) -> None:
            self.is_closed = True

    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=Bar)
    (bar,) = made
    assert (bar.options["total"], bar.count, bar.is_closed) == (3, 3, True)


def test_chat_accepts_messages_as_servers_get_them(llm: LLM) -> None:
    """Parts of text, several conversations, a last message to go on with."""
    text: list[Any] = [{"role": "user", "content": "the first"}]
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "the first"}]}]
    one, same = llm.chat([text, parts], GREEDY, False)
    assert one.prompt == same.prompt == "<user>the first<assistant>"
    begun = [*text, {"role": "assistant", "content": "It"}]
    (output,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == "<user>the first<assistant>It"
    with pytest.raises(RequestError, match="a part of type 'image_url'"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], GREEDY)


def test_a_forgotten_prefix_is_computed_again(llm: LLM) -> None:
    prompt = [7] * 40
    llm.generate(prompt, GREEDY)
    hits = llm.engine.stats.num_prefix_hits
    llm.generate(prompt, GREEDY)
    assert llm.engine.stats.num_prefix_hits == hits + 32
    assert llm.reset_prefix_cache() is True
    llm.generate(prompt, GREEDY)
    assert llm.engine.stats.num_prefix_hits == hits + 32


def test_unavailable_arguments_and_methods_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(RequestError, match="lora_request='a'; it must be a LoRARequest or None"):
        llm.generate("a", GREEDY, lora_request="a")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="generate takes no prompt_token_ids: give the ids as prompts"):
        llm.generate(sampling_params=GREEDY, prompt_token_ids=[[1]])
    with pytest.raises(AttributeError, match="LLM has no release_kv_cache_memory, .*: LLM.sleep and wake_up are here"):
        llm.release_kv_cache_memory()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'generat'"):
        llm.generat("a")  # type: ignore[attr-defined]
    assert not hasattr(llm, "release_kv_cache_memory")
    with pytest.raises(AttributeError, match="LLM has no set_tokenizer, .*: give `tokenizer` to `LLM`"):
        llm.set_tokenizer(None)  # type: ignore[attr-defined]


def test_arguments_that_ask_for_nothing_are_accepted(llama_dir: Path, tmp_path: Path) -> None:
    """Arguments at vLLM's default values are accepted, and so is a template for all conversations."""
    (tmp_path / "template.jinja").write_text("{{ messages[0].content }}")
    with LLM(
        str(llama_dir),
        dtype="float32",
        compiler="eager",
        num_kv_blocks=8,
        chat_template=str(tmp_path / "template.jinja"),
        enable_chunked_prefill=True,
        disable_log_stats=True,
        quantization=None,
        swap_space=4,
        tokenizer_mode="auto",
        kv_cache_dtype="auto",
        pipeline_parallel_size=1,
        data_parallel_size=1,
        enable_lora=False,
        max_loras=4,
        speculative_config=None,
        allowed_local_media_path="",
        limit_mm_per_prompt={},
        cpu_offload_gb=0,
        disable_custom_all_reduce=True,
        download_dir=None,
        task="generate",
        generation_config="auto",
    ) as llm:
        (output,) = llm.chat([{"role": "user", "content": "the"}], GREEDY)
        assert output.prompt == "the"


def test_no_tokenizer(llama_dir: Path) -> None:
    with LLM(llama_dir, skip_tokenizer_init=True, compiler="eager", num_kv_blocks=8) as llm:
        assert len(llm.generate([5, 6], GREEDY)) == 1
        with pytest.raises(UsageError, match="there is no tokenizer"):
            llm.get_tokenizer()
