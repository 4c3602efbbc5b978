"""The server as its clients see it: the `openai` client and raw sockets against one real process."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import jsonschema
import openai
import pytest

from piecegraph import LLM, SamplingParams
from piecegraph.cache.store.store import Loaded
from piecegraph.compiler.store.cache_choice import open_store
from piecegraph.config import CompileConfig
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.tiny_models import llama_config, random_model, save
from tests.tools.serve.malformed_bodies import malformed_bodies
from tests.tools.serve.serving import HTTP, ServerProcess, running_server

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

KEY = "a key of the tests"
MAX_BODY_BYTES = 100_000
MESSAGES: list[Any] = [{"role": "user", "content": "the end"}]
PROMPT = "<user>the end<assistant>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama over the byte tokenizer's vocabulary."""
    config = llama_config(vocab_size=261, eos_token_id=1, max_position_embeddings=512)
    folder = save(random_model(config), tmp_path_factory.mktemp("llama"))
    byte_tokenizer().save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for the whole file: four requests at once, twelve more in its queue."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"another key\n{KEY}\n")
    flags = ["--served-model-name", "tiny", "--api-key-file", str(keys), "--max-body-bytes", str(MAX_BODY_BYTES)]
    with running_server(model, *flags, "--max-num-seqs", "4", "--max-num-queued-reqs", "12") as running:
        yield running


@pytest.fixture(scope="module")
def offline(model: Path) -> Iterator[LLM]:
    """The same model without a server."""
    with LLM(model, dtype="float32", compiler="eager", max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def post(server: ServerProcess, path: str, body: bytes | dict[str, Any], **headers: str) -> httpx.Response:
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    sent = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **headers}
    return HTTP.post(f"{server.url}{path}", content=content, headers=sent)


def metric(server: ServerProcess, name: str) -> float:
    text = HTTP.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


def wait_until_idle(server: ServerProcess) -> None:
    deadline = time.monotonic() + 60
    while metric(server, "vllm:num_requests_running") or metric(server, "vllm:num_requests_waiting"):
        assert time.monotonic() < deadline, "requests still run"
        time.sleep(0.02)


def assert_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, (response.status_code, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in response.text
    assert 'File "' not in response.text
    return dict(error)


def test_a_chat_answer_equals_the_offline_one(client: openai.OpenAI, offline: LLM) -> None:
    (expected,) = offline.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=12)
    (choice,) = reply.choices
    assert choice.message.content == expected.outputs[0].text
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert reply.usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_a_chat_answer_streams(client: openai.OpenAI, offline: LLM) -> None:
    """The deltas of two completions make up the offline texts; the usage comes last."""
    params = SamplingParams(n=2, seed=5, max_tokens=12, temperature=0.8)
    (expected,) = offline.generate(PROMPT, params, use_tqdm=False)
    texts, reasons, usage = ["", ""], ["", ""], None
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        n=2,
        seed=5,
        temperature=0.8,
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [completion.text for completion in expected.outputs]
    assert reasons == [completion.finish_reason for completion in expected.outputs]
    assert usage is not None
    assert usage.completion_tokens == sum(len(completion.token_ids) for completion in expected.outputs)


def test_many_streams_at_once_equal_their_offline_answers(server: ServerProcess, offline: LLM) -> None:
    """Of twelve prompts at once no token is lost or mixed up."""
    prompts = [f"prompt number {number}" for number in range(12)]
    expected = offline.generate(prompts, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)

    async def answer(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=20, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def answer_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*[answer(client, prompt) for prompt in prompts])

    assert asyncio.run(answer_all()) == [output.outputs[0].text for output in expected]


def test_text_completions_of_several_prompts(client: openai.OpenAI, offline: LLM) -> None:
    """Choices go by prompt, then by completion; token ids are a prompt, too."""
    params = SamplingParams(n=2, seed=3, max_tokens=6)
    texts = [
        completion.text
        for output in offline.generate(["one", "two"], params, use_tqdm=False)
        for completion in output.outputs
    ]
    reply = client.completions.create(model="tiny", prompt=["one", "two"], n=2, seed=3, max_tokens=6)
    assert [choice.text for choice in reply.choices] == texts
    tokens = byte_tokenizer()("one")["input_ids"]
    reply = client.completions.create(model="tiny", prompt=tokens, n=2, seed=3, max_tokens=6)
    assert [choice.text for choice in reply.choices] == texts[:2]


def test_log_probabilities_of_a_chat(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    (expected,) = offline.generate(PROMPT, params, use_tqdm=False)
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None
    completion = expected.outputs[0]
    assert completion.logprobs is not None
    for entry, token, position in zip(content, completion.token_ids, completion.logprobs, strict=True):
        assert entry.logprob == pytest.approx(position[token].logprob, abs=1e-4)
        assert entry.token == position[token].decoded_token
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


def test_echo_with_log_probabilities(client: openai.OpenAI) -> None:
    """The prompt's first token has none; offsets are those in the text."""
    reply = client.completions.create(model="tiny", prompt="the end", max_tokens=2, logprobs=1, echo=True, seed=1)
    (choice,) = reply.choices
    assert choice.text.startswith("the end")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.tokens[:3] == ["the", " ", "e"]
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:] if value is not None)
    assert logprobs.text_offset[:3] == [0, 3, 4]
    assert len(logprobs.tokens) == len(logprobs.text_offset) == 5 + 2


def test_a_stream_has_the_log_probabilities_of_the_whole_reply(client: openai.OpenAI) -> None:
    """The offsets, too, although text comes later than its tokens where a stop string might begin."""
    options: Any = {"model": "tiny", "prompt": "the end", "seed": 7, "max_tokens": 12, "logprobs": 0}
    drawn = client.completions.create(**options).choices[0].logprobs
    assert drawn is not None and drawn.tokens is not None
    options["stop"] = [drawn.tokens[4] + "never"]
    whole = client.completions.create(**options).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**options, stream=True)]
    assert whole is not None
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [each for part in parts if part for each in getattr(part, name)] == pytest.approx(getattr(whole, name))


def test_a_prompt_that_is_cut_is_counted_as_it_is_and_not_echoed(client: openai.OpenAI) -> None:
    ask: Any = {
        "model": "tiny",
        "prompt": "the end of it",
        "max_tokens": 1,
        "extra_body": {"truncate_prompt_tokens": 2},
    }
    whole = client.completions.create(**ask)
    *_, last = client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    assert whole.usage is not None and last.usage is not None
    assert whole.usage.prompt_tokens == last.usage.prompt_tokens == 2
    with pytest.raises(openai.BadRequestError, match="echo with truncate_prompt_tokens is not available"):
        client.completions.create(**ask, echo=True)


def test_options_of_the_api_and_of_vllm_reach_the_sampler(client: openai.OpenAI, offline: LLM) -> None:
    """`stop`, `logit_bias` and penalties; `top_k`, `min_tokens` and `stop_token_ids` in the extra body."""
    bias = {70: 3.0, 71: 3.0}
    params = SamplingParams(
        seed=9,
        max_tokens=30,
        min_tokens=4,
        top_k=5,
        logit_bias=bias,
        presence_penalty=0.5,
        stop=["b"],
        stop_token_ids=[80],
    )
    (expected,) = offline.generate("options", params, use_tqdm=False)
    reply = client.completions.create(
        model="tiny",
        prompt="options",
        seed=9,
        max_tokens=30,
        logit_bias={str(token): 3 for token in bias},
        presence_penalty=0.5,
        stop=["b"],
        extra_body={"top_k": 5, "min_tokens": 4, "stop_token_ids": [80], "return_token_ids": True},
    )
    assert reply.choices[0].text == expected.outputs[0].text
    extra = reply.choices[0].model_extra
    assert extra is not None
    assert extra["token_ids"] == expected.outputs[0].token_ids
    assert extra["stop_reason"] == expected.outputs[0].stop_reason


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


def test_json_of_a_schema(client: openai.OpenAI) -> None:
    """By `response_format`, whole and streamed, and by vLLM's `structured_outputs`; both ways of the same text."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 100, "seed": 4}
    text = client.chat.completions.create(response_format=form, **options).choices[0].message.content
    assert text is not None
    jsonschema.validate(json.loads(text), SCHEMA)
    stream = client.chat.completions.create(response_format=form, stream=True, **options)
    assert "".join([chunk.choices[0].delta.content or "" for chunk in stream]) == text
    extra = {"structured_outputs": {"json": SCHEMA}}
    assert client.chat.completions.create(extra_body=extra, **options).choices[0].message.content == text
    choice = client.completions.create(
        model="tiny", prompt="a", seed=2, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert choice.choices[0].text in ("yes", "no")


def test_forced_calls_of_tools(client: openai.OpenAI) -> None:
    """The reply, and the deltas of a stream, are calls with arguments of the tool's schema."""
    options: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "seed": 4, "max_tokens": 300}
    named = {"type": "function", "function": {"name": "weather"}}
    # Calls that follow each other are allowed by default; a named function is called once, even without an EOS token.
    choices: list[Any] = [
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": named, "logit_bias": {"1": -100}},
    ]
    for choice in choices:
        reply = client.chat.completions.create(**choice, **options).choices[0]
        assert reply.finish_reason == "tool_calls"
        assert reply.message.content is None
        assert reply.message.tool_calls is not None
        (call,) = reply.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        arguments, names, reasons = "", [], []
        for chunk in client.chat.completions.create(**choice, stream=True, **options):
            reasons.append(chunk.choices[0].finish_reason)
            for part in chunk.choices[0].delta.tool_calls or ():
                assert part.function is not None
                names.append(part.function.name)
                arguments += part.function.arguments or ""
        assert names == ["weather"]
        assert arguments == call.function.arguments
        assert reasons[-1] == "tool_calls"


def test_a_template_without_tools_is_told(client: openai.OpenAI) -> None:
    """A call that the model was never told of is refused unless it is forced; without a choice of tools all is text."""
    with pytest.raises(openai.BadRequestError, match="chat template does not list them"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS)
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="none", max_tokens=3
    )
    assert reply.choices[0].message.tool_calls is None


def test_models_tokens_and_version(client: openai.OpenAI, server: ServerProcess) -> None:
    assert [card.id for card in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "piecegraph"
    with pytest.raises(openai.NotFoundError, match="Did you mean 'tiny'"):
        client.chat.completions.create(model="tinny", messages=MESSAGES)
    tokens = post(server, "/tokenize", {"prompt": "the end"}).json()
    assert tokens["tokens"] == byte_tokenizer()("the end")["input_ids"]
    assert (tokens["count"], tokens["max_model_len"]) == (5, 512)
    rendered = post(server, "/tokenize", {"messages": MESSAGES}).json()
    assert rendered["tokens"] == byte_tokenizer()(PROMPT)["input_ids"]
    assert post(server, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "the end"}
    version = HTTP.get(f"{server.url}/version", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert set(version) == {"version"}


def test_a_request_needs_a_key(server: ServerProcess) -> None:
    """Without one, or with a wrong one, nothing but the probes answers."""
    body = {"messages": MESSAGES}
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        assert assert_error(post(server, "/v1/chat/completions", body, **headers), 401)["code"] == "invalid_api_key"
    assert HTTP.get(f"{server.url}/metrics").status_code == 401
    assert HTTP.get(f"{server.url}/health").status_code == 200
    assert HTTP.get(f"{server.url}/ready").json() == {"status": "serving", "start": "full speed"}
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="another key", max_retries=0)
    assert other.completions.create(model="tiny", prompt="a", max_tokens=1).choices


def test_malformed_bodies_are_refused(server: ServerProcess, client: openai.OpenAI) -> None:
    """Each gets status 400 in the API's shape, and the server answers afterwards."""
    bodies = malformed_bodies()
    assert len(bodies) >= 100
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        for path, body in bodies:
            response = http.post(path, content=body)
            assert response.status_code == 400, (path, body[:200], response.status_code, response.text)
            assert_error(response, 400)
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices
    assert "Traceback" not in server.log


def test_what_is_wrong_is_named(server: ServerProcess) -> None:
    error = assert_error(post(server, "/v1/completions", {"prompt": "a", "temprature": 1}), 400)
    assert error["message"] == "unknown field 'temprature'. Did you mean 'temperature'?"
    assert error["param"] == "temprature"
    error = assert_error(post(server, "/v1/completions", {"prompt": "a", "top_p": 3}), 400)
    assert error["message"].startswith("top_p=3.0; it must be")
    assert error["param"] == "top_p"
    error = assert_error(post(server, "/v1/completions", {"prompt": [5] * 600}), 400)
    assert error["code"] == "context_length_exceeded"
    assert_error(HTTP.get(f"{server.url}/nothing", headers={"Authorization": f"Bearer {KEY}"}), 404)
    assert_error(HTTP.get(f"{server.url}/v1/completions", headers={"Authorization": f"Bearer {KEY}"}), 405)


def test_a_body_that_is_too_large_is_refused(server: ServerProcess) -> None:
    """By its declared length before it is sent, or by what has come of it."""
    body = json.dumps({"prompt": "x" * MAX_BODY_BYTES}).encode()
    assert assert_error(post(server, "/v1/completions", body), 413)["code"] == "body_too_large"

    def parts() -> Iterator[bytes]:
        for _ in range(20):
            yield b"x" * 10_000

    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    response = HTTP.post(f"{server.url}/v1/completions", content=parts(), headers=headers)
    assert_error(response, 413)


def raw_request(server: ServerProcess, body: dict[str, Any]) -> socket.socket:
    """Send a request by a socket that the test holds."""
    content = json.dumps(body).encode()
    address = urlparse(server.url)
    assert address.hostname is not None
    connection = socket.create_connection((address.hostname, address.port or 80), timeout=60)
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    return connection


ENDLESS = {"prompt": "endless", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("is_stream", [True, False])
def test_the_request_of_a_client_that_goes_away_is_aborted(server: ServerProcess, is_stream: bool) -> None:
    """It stops running long before its 16 times 480 tokens are made."""
    wait_until_idle(server)
    before = metric(server, "vllm:generation_tokens_total")
    connection = raw_request(server, {**ENDLESS, "n": 16, "temperature": 1, "stream": is_stream})
    deadline = time.monotonic() + 60
    while metric(server, "vllm:generation_tokens_total") == before:
        assert time.monotonic() < deadline
    connection.close()
    wait_until_idle(server)
    assert metric(server, "vllm:generation_tokens_total") < before + 7000


def test_a_slow_reader_holds_up_nobody(server: ServerProcess, client: openai.OpenAI) -> None:
    """A client that sends a request and reads nothing: others are answered, and it gets all when it reads."""
    with raw_request(server, {**ENDLESS, "max_tokens": 200, "stream": True}) as slow:
        assert client.completions.create(model="tiny", prompt="a", max_tokens=3).choices
        wait_until_idle(server)
        received = b""
        while b"[DONE]" not in received:
            received += slow.recv(65536)
    assert received.count(b'"finish_reason":"length"') == 1


def test_a_queue_that_is_full_refuses(server: ServerProcess) -> None:
    """Sixteen completions run or wait; one more gets status 429 with Retry-After."""
    wait_until_idle(server)
    held = [raw_request(server, {**ENDLESS, "stream": True}) for _ in range(16)]
    try:
        deadline = time.monotonic() + 60
        while metric(server, "vllm:num_requests_waiting") < 12:
            assert time.monotonic() < deadline
        response = post(server, "/v1/completions", {"prompt": "a"})
        assert assert_error(response, 429)["code"] == "queue_full"
        assert int(response.headers["Retry-After"]) >= 1
    finally:
        for connection in held:
            connection.close()
    wait_until_idle(server)
    assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_metrics_have_vllms_names(server: ServerProcess) -> None:
    names = """vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:prompt_tokens_total
        vllm:generation_tokens_total vllm:request_success_total vllm:time_to_first_token_seconds_bucket
        vllm:e2e_request_latency_seconds_count vllm:num_preemptions_total http_requests_total"""
    text = HTTP.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    assert [name for name in names.split() if f"\n{name}{{" not in text] == []
    assert metric(server, "vllm:request_success_total") > 10


def test_sigterm_drains(server: ServerProcess) -> None:
    """The last test: a running stream ends as it should, new requests are refused, and the process ends with 0.

    Another request waits until a new one was refused: the process would not end before, however busy the machine is.
    """
    wait_until_idle(server)
    received = bytearray()
    with raw_request(server, {**ENDLESS, "max_tokens": 400, "stream": True}) as running:
        received += running.recv(1000)
        with raw_request(server, {**ENDLESS, "n": 15, "temperature": 1}):
            while metric(server, "vllm:num_requests_waiting") == 0:
                time.sleep(0.005)
            server.process.send_signal(signal.SIGTERM)
            while HTTP.get(f"{server.url}/ready").status_code == 200:
                time.sleep(0.005)
            response = post(server, "/v1/completions", {"prompt": "a"})
            assert assert_error(response, 503)["code"] == "shutting_down"
        while b"[DONE]" not in received:
            received += running.recv(65536)
    assert b'"finish_reason":"length"' in received
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_a_server_answers_while_it_compiles_and_ends_without_a_trace(model: Path, tmp_path: Path) -> None:
    """`/ready` says how far it is; SIGTERM ends the compile processes with it, and the cache holds whole entries."""
    environment = {"PIECEGRAPH_CACHE_DIR": str(tmp_path), "PIECEGRAPH_CACHE": "on"}
    with running_server(model, "--compiler", "inductor", **environment) as server:
        found = HTTP.get(f"{server.url}/ready").json()
        assert found["status"] == "serving"
        assert found["start"] == "full speed" or found["start"].startswith("compiling ")
        assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
        assert "piecegraph:is_at_full_speed" in HTTP.get(f"{server.url}/metrics").text
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        assert server.end() == 0
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    store = open_store(CompileConfig(cache_dir=str(tmp_path)))
    assert all(isinstance(store.load(row.key), Loaded) for row in store.list())


@pytest.mark.slow
def test_a_second_signal_ends_at_once(model: Path) -> None:
    """A stream that runs is cut off; the exit code is that of the signal."""
    with running_server(model) as server:
        url = urlparse(server.url)
        body = json.dumps({**ENDLESS, "stream": True})
        connection = socket.create_connection((url.hostname or "", url.port or 80), timeout=60)
        request = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: "
        connection.sendall(f"{request}{len(body)}\r\n\r\n{body}".encode())
        connection.recv(1000)
        server.process.send_signal(signal.SIGTERM)
        while HTTP.get(f"{server.url}/ready").status_code == 200:
            time.sleep(0.01)
        assert server.end(signal.SIGTERM, timeout_s=20) == 128 + signal.SIGTERM
        connection.close()
