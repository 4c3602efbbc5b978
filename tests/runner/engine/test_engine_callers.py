"""Several callers of one engine: each gets its own outputs, and what one brings stops no other."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from piecegraph import LLM, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError, RequestError
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.engine.engine import Engine
from piecegraph.runner.engine.model_runner import PROMPT_LOGPROBS_RUN_UNCAPTURED
from tests.runner.test_graphs import SIZES, load

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [5, 6, 7]


def drain(engine: Engine) -> list[RequestOutput]:
    """Return every output that the engine's own caller receives until nothing is left."""
    outputs: list[RequestOutput] = []
    for _ in range(100):
        if not engine.has_unfinished:
            return outputs
        outputs += engine.step()
    raise AssertionError("requests that never end")


def test_generate_leaves_outputs_of_others_to_them(llm: LLM) -> None:
    """One stream is read as it comes, one when it is finished; both end while `generate` runs."""
    engine = llm.engine
    (alone,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY)
    engine.add_request("read", PROMPT, GREEDY)
    engine.add_request("final", PROMPT, GREEDY, is_final_only=True)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY)
    assert output.outputs == alone.outputs
    assert engine.has_unfinished, "somebody is to be told"
    told = {output.request_id: output for output in drain(engine)}
    assert {name: output.outputs for name, output in told.items()} == {"read": alone.outputs, "final": alone.outputs}
    assert engine.step() == []


def test_a_stream_gets_what_another_callers_steps_made(llm: LLM) -> None:
    """The caller of `step` receives nothing of the stream's."""
    (alone,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY)
    stream = llm.stream({"prompt_token_ids": PROMPT}, GREEDY)
    assert not next(stream).finished
    llm.engine.add_request("other", [9, 9], GREEDY)
    assert {output.request_id for output in drain(llm.engine)} == {"other"}
    *_, last = stream
    assert last.finished and last.outputs == alone.outputs


def test_streams_and_generate_in_turns(llm: LLM) -> None:
    (alone,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY)
    first, second = (llm.stream({"prompt_token_ids": PROMPT}, GREEDY) for _ in range(2))
    next(first), next(second)
    assert llm.generate({"prompt_token_ids": PROMPT}, GREEDY)[0].outputs == alone.outputs
    assert [list(stream)[-1].outputs for stream in (second, first)] == [alone.outputs] * 2


def test_a_stream_whose_request_another_caller_ends_ends(llm: LLM) -> None:
    stream = llm.stream({"prompt_token_ids": PROMPT}, GREEDY)
    output = next(stream)
    assert llm.engine.abort(output.request_id) is not None
    *_, last = stream
    assert last.finished and last.outputs[0].finish_reason == "abort"


def test_generate_uses_ids_that_are_not_taken(llm: LLM) -> None:
    engine = llm.engine
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY)
    taken = [str(int(output.request_id) + 2), str(int(output.request_id) + 3)]
    for name in taken:
        engine.add_request(name, PROMPT, GREEDY)
    found = llm.generate([{"prompt_token_ids": PROMPT}] * 3, GREEDY)
    assert not {output.request_id for output in found} & set(taken)
    assert {output.request_id for output in drain(engine)} == set(taken)


def test_leaving_a_stream_ends_only_its_requests(llm: LLM) -> None:
    stream = llm.stream([{"prompt_token_ids": PROMPT}] * 2, GREEDY)
    list(islice(stream, 2))
    llm.engine.add_request("other", PROMPT, GREEDY)
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    assert list(llm.engine.requests) == ["other"]
    drain(llm.engine)


REFUSED: dict[str, Mapping[str, Any]] = {
    "salt": {"cache_salt": "\ud800"},
    "priority": {"priority": 1.5},
    "bytes": {"cache_salt": b"x"},
    "text": {"prompt": 5},
    "bad words": {"sampling_params": SamplingParams(bad_words=["\ud800"])},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_a_request_too_large_for_any_step_is_refused_and_others_continue(llm: LLM, fields: Mapping[str, Any]) -> None:
    llm.engine.add_request("good", PROMPT, GREEDY)
    llm.engine.step()
    with pytest.raises(RequestError):
        llm.engine.add_request("bad", [8] * 40, **{"sampling_params": GREEDY, **fields})
    assert [output.request_id for output in drain(llm.engine) if output.finished] == ["good"]


@pytest.mark.parametrize("huge", [2**31 - 1, 2**31, 2**63, 10**400], ids=["int32", "uint32", "uint64", "more"])
def test_numbers_too_large_for_a_tensor_stop_no_other_request(llm: LLM, huge: int) -> None:
    """Such numbers are refused, or act like the largest meaningful value."""
    for options in (
        {"min_tokens": huge, "max_tokens": None, "stop_token_ids": [5]},
        {"stop_token_ids": [huge], "min_tokens": 2},
        {"top_k": huge},
        {"max_tokens": huge},
        {"logit_bias": {5: huge}},
        {"logprobs": huge},
        {"prompt_logprobs": huge},
    ):
        try:
            params = SamplingParams(**{"max_tokens": 4, **options})  # type: ignore[arg-type]
            llm.engine.add_request("odd", [8] * 80, params)
        except RequestError:
            continue
        llm.engine.add_request("good", PROMPT, GREEDY)
        finished = {output.request_id: output.outputs[0] for output in drain(llm.engine) if output.finished}
        assert finished["odd"].finish_reason in ("stop", "length"), options
        assert len(finished["good"].token_ids) == 6


@pytest.fixture(scope="module")
def strict_options() -> dict[str, Any]:
    return {"strict": True, "max_num_batched_tokens": SIZES[-1]}


def test_strict_allows_a_downgrade_that_a_request_requires(llama_dir: Path, strict_options: dict[str, Any]) -> None:
    """No graph returns log probabilities of a prompt; that stops neither this request nor the next."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    with load(llama_dir, **strict_options) as llm:
        prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": [*range(20, 60)]}]
        found = llm.generate(prompts, [params, GREEDY], use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in found] == [3, 6]
        assert found[0].prompt_logprobs is not None and len(found[0].prompt_logprobs) == 3
        rows = [row for row in llm.runner.counters.rows() if row.reason is not None]
        assert [(row.mode, row.reason) for row in rows] == [(CUDAGraphMode.NONE, PROMPT_LOGPROBS_RUN_UNCAPTURED)]


def test_strict_refuses_steps_that_no_graph_holds_at_start(llama_dir: Path) -> None:
    message = r"strict=True, and a step may compute 17 tokens \(max_num_batched_tokens=17\), .* is 16\. Add 17 to them"
    with pytest.raises(ConfigError, match=message):
        load(llama_dir, strict=True, max_num_batched_tokens=17)
