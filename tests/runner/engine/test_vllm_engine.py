"""Loops written for vLLM's engine run on ours."""

from __future__ import annotations

from piecegraph import LLM, SamplingParams
from piecegraph.runner.engine.metrics import Counter

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_an_engine_loop_with_vllms_names(llm: LLM) -> None:
    """Prompts in every form, one of them given up, the other as `generate` answers it."""
    engine = llm.llm_engine
    assert engine.add_request("a", "the first", GREEDY, priority=1) == "a"
    engine.add_request("b", {"prompt_token_ids": [5, 6]}, GREEDY)
    assert engine.get_num_unfinished_requests() == 2
    engine.abort_request(["b", "unknown"])
    finished = []
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    (output,) = [output for output in finished if output.request_id == "a"]
    assert output.outputs == llm.generate("the first", GREEDY)[0].outputs


def test_vllms_accessors_return_the_engines_values(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.get_tokenizer() is llm.get_tokenizer()
    assert engine.model_config.max_model_len == llm.max_model_len
    assert engine.model_config.get_vocab_size() == 261
    assert engine.model_config.get_hidden_size() == llm.hf_config.hidden_size
    before = {metric.name: metric for metric in llm.get_metrics()}["vllm:generation_tokens"]
    llm.generate("a", GREEDY)
    after = {metric.name: metric for metric in engine.get_metrics()}["vllm:generation_tokens"]
    assert isinstance(before, Counter) and isinstance(after, Counter)
    assert after.value == before.value + 4
