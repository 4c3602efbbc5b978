"""`LLM` answers what was asked, in the order asked, and says why it stopped."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from itertools import islice, pairwise
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.errors import RequestError, UsageError
from tests.runner.margin_rule import assert_same_tokens, generate_alone

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPTS = ["the first", "x", "a longer one, the third of them"]


def test_prompts_of_different_lengths_answer_as_transformers_does(llm: LLM, llama: PreTrainedModel) -> None:
    """Text prompts, in their order, with all that `RequestOutput` promises."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert output.finished
        assert_same_tokens(llama, output.prompt_token_ids, output.outputs[0].token_ids)
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)
        assert llm.tokenizer is not None
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)


def test_one_prompt_alone_is_a_list_of_one(llm: LLM) -> None:
    (text,) = llm.generate("the first", GREEDY)
    assert llm.tokenizer is not None
    ids = llm.tokenizer("the first")["input_ids"]
    (tokens,) = llm.generate({"prompt_token_ids": ids}, GREEDY)
    assert text.outputs == tokens.outputs
    assert (tokens.prompt, tokens.prompt_token_ids) == (None, ids)


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 4, 2)]
    assert [len(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)] == [1, 4, 2]
    with pytest.raises(RequestError, match="3 prompts, but 2 sampling_params"):
        llm.generate(PROMPTS, params[:2])


def test_stop_token(llm: LLM) -> None:
    """The token is in `token_ids`, its text is not in `text`, and `stop_reason` names it."""
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    tokens = whole.outputs[0].token_ids
    stop = tokens[4]
    length = tokens.index(stop) + 1
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, stop_token_ids=[stop])
    (output,) = llm.generate(PROMPTS[0], params)
    assert output.outputs[0].token_ids == tokens[:length]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert llm.tokenizer is not None
    assert output.outputs[0].text == llm.tokenizer.decode(tokens[: length - 1])


def test_stop_string(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    text = whole.outputs[0].text
    stop = text[3:5]
    for include in (False, True):
        params = SamplingParams(
            temperature=0.0, max_tokens=10, ignore_eos=True, stop=stop, include_stop_str_in_output=include
        )
        (output,) = llm.generate(PROMPTS[0], params)
        assert output.outputs[0].text == text[: text.index(stop)] + (stop if include else "")
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_eos_ends_a_text_unless_ignored(llama: PreTrainedModel, llama_dir: Path, tmp_path: Path) -> None:
    """The generation config's EOS, of which there may be several."""
    prompt = [5, 6, 7]
    tokens = generate_alone(llama, prompt, 8)
    eos = tokens[3]
    folder = shutil.copytree(llama_dir, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, eos]}))
    with LLM(folder, dtype="float32", compiler="eager", skip_tokenizer_init=True, num_kv_blocks=8) as llm:
        (output,) = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=8))
        assert output.outputs[0].token_ids == tokens[: tokens.index(eos) + 1]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
        (output,) = llm.generate({"prompt_token_ids": prompt}, GREEDY)
        assert len(output.outputs[0].token_ids) == 10


def test_stream_gives_the_text_so_far(llm: LLM) -> None:
    """There is one output per token, each longer than the preceding one; the last equals that of `generate`."""
    seen = [output.outputs[0] for output in llm.stream("the first", GREEDY)]
    (whole,) = llm.generate("the first", GREEDY)
    assert [len(completion.token_ids) for completion in seen] == list(range(1, 11))
    assert all(later.text.startswith(earlier.text) for earlier, later in pairwise(seen))
    assert seen[-1] == whole.outputs[0]


def test_two_streams_can_be_read_in_turns(llm: LLM) -> None:
    """Neither loses what a step computed while the other was read."""
    first, second = llm.stream("the first", GREEDY), llm.stream("x", GREEDY)
    pairs = list(zip(first, second, strict=True))
    assert [len(a.outputs[0].token_ids) for a, _ in pairs] == list(range(1, 11))
    alone = llm.generate(["the first", "x"], GREEDY)
    assert [output.outputs for output in pairs[-1]] == [output.outputs for output in alone]


def test_leaving_a_stream_frees_its_request(llm: LLM) -> None:
    stream = llm.stream("the first", GREEDY)
    assert len(list(islice(stream, 2))) == 2
    assert llm.engine.has_unfinished
    del stream
    assert not llm.engine.has_unfinished


def test_seeds_repeat_in_any_company(llm: LLM) -> None:
    """A seeded request draws the same tokens alone and among others; other seeds draw others."""
    params = [SamplingParams(seed=seed, max_tokens=12, temperature=2.0, ignore_eos=True) for seed in (1, 2, 3)]
    together = llm.generate(["x"] * 3, params)
    alone = [llm.generate("x", one)[0] for one in reversed(params)][::-1]
    assert [output.outputs for output in together] == [output.outputs for output in alone]
    assert len({tuple(output.outputs[0].token_ids) for output in together}) == 3


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the first"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == "<user>the first<assistant>"
    both = llm.chat([messages, messages], GREEDY)
    assert [one.outputs for one in both] == [output.outputs] * 2
    (other,) = llm.chat(messages, GREEDY, chat_template="{{ messages[0]['content'] }}")
    assert other.prompt == "the first"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [5] * 96}, "the prompt has 96 tokens; max_model_len=96 leaves room for at most 95"),
        ({"prompt_token_ids": [261]}, "token id 261; ids go from 0 to 260"),
        ({"prompt_token_ids": [-1]}, "token id -1; ids go from 0 to 260"),
        ({"text": "text"}, "a prompt takes no 'text'. Known: cache_salt, prompt, "),
        (7, "a prompt is a string, .*, not 7"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused(llm: LLM, prompt: object, message: str) -> None:
    """Before anything runs: the good prompts beside it are not started either."""
    with pytest.raises(RequestError, match=message):
        llm.generate(["good", prompt], GREEDY)
    assert not llm.engine.has_unfinished


def test_a_bad_conversation_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the conversation is empty"):
        llm.chat([], GREEDY)
    with pytest.raises(RequestError, match="the chat template refused the messages: boom"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, chat_template="{{ raise_exception('boom') }}")


def test_an_answer_ends_at_the_models_length(llm: LLM) -> None:
    (output,) = llm.generate({"prompt_token_ids": [5] * 90}, SamplingParams(max_tokens=None, seed=0, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].finish_reason == "length"


def test_small_steps_and_few_blocks_change_no_token(llama_dir: Path, llama: PreTrainedModel) -> None:
    """Chunked prompts and requests that wait for blocks answer as they would alone."""
    prompts = [[5] * 20, list(range(2, 40)), [9], list(range(60, 71))]
    with LLM(
        llama_dir,
        skip_tokenizer_init=True,
        dtype="float32",
        compiler="eager",
        max_num_seqs=2,
        max_num_batched_tokens=7,
        block_size=3,
        num_kv_blocks=32,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(llama, prompt, output.outputs[0].token_ids)


def test_without_a_tokenizer_there_is_no_text(llama_dir: Path) -> None:
    with LLM(llama_dir, skip_tokenizer_init=True, dtype="float32", compiler="eager", num_kv_blocks=8) as llm:
        (output,) = llm.generate({"prompt_token_ids": [5]}, GREEDY)
        assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 10)
        with pytest.raises(RequestError, match="a text prompt needs a tokenizer"):
            llm.generate("text", GREEDY)
        with pytest.raises(RequestError, match="stop strings need a tokenizer"):
            llm.generate({"prompt_token_ids": [5]}, SamplingParams(stop="x"))
        with pytest.raises(RequestError, match="chat needs a tokenizer"):
            llm.chat([{"role": "user", "content": "x"}])
    with pytest.raises(UsageError, match="this LLM is closed"):
        llm.generate({"prompt_token_ids": [5]}, GREEDY)
    llm.close()


def test_an_aborted_request_keeps_what_it_has(llm: LLM) -> None:
    """The engine's own loop, as a server would drive it."""
    engine = llm.engine
    engine.add_request("mine", [5, 6], GREEDY)
    with pytest.raises(RequestError, match="a request 'mine' is already running"):
        engine.add_request("mine", [5, 6], GREEDY)
    engine.step()
    engine.step()
    output = engine.abort("mine")
    assert output is not None
    assert (output.finished, output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == (True, "abort", 2)
    assert engine.abort("mine") is None
    assert engine.step() == []


def test_an_earlier_model_is_freed_before_the_next_one_loads(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts hold each other, so only the collector frees it, which rests while one is loaded."""
    from piecegraph.runner.startup import load_engine

    llm = LLM(str(llama_dir), compiler="eager", num_kv_blocks=8, device="cpu")
    weights = [weakref.ref(tensor) for _, tensor in llm.compiled.bound_tensors()]
    seen: list[int] = []

    def count(*args: object) -> None:
        seen.append(sum(weight() is not None for weight in weights))
        raise ZeroDivisionError

    monkeypatch.setattr(load_engine, "load_engine", count)
    gc.disable()
    try:
        llm.close()
        del llm
        seen.append(sum(weight() is not None for weight in weights))
        gc.enable()
        with pytest.raises(ZeroDivisionError):
            LLM(str(llama_dir))
    finally:
        gc.enable()
    assert seen[1] < seen[0] == len(weights)  # the others torch has, as inputs of what it traced
