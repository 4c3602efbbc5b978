"""A server of a model that pools, as its clients see it: the `openai` client and raw sockets against one process."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import openai
import pytest
import torch

from piecegraph import LLM, PoolingParams
from piecegraph.tools.serve.endpoints.embeddings import embedding_data
from piecegraph.tools.serve.protocol.error_replies import ApiError
from tests.runner.pooling.encoder_models import FAMILIES, MAX_LEN, VOCAB_SIZE, save_model, texts
from tests.tools.serve.serving import HTTP, ServerProcess, running_server

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

MATRYOSHKA = {"is_matryoshka": True, "matryoshka_dimensions": [8, 16]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT whose config allows 8 and 16 dimensions."""
    folder = tmp_path_factory.mktemp("bert")
    save_model(FAMILIES["bert"](), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **MATRYOSHKA}))
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    """One server for the whole file: four texts at once, 60 more in its queue."""
    flags = ("--served-model-name", "bert", "--max-num-seqs", "4", "--max-num-queued-reqs", "60")
    with running_server(model, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def offline(model: Path) -> Iterator[LLM]:
    """The same model without a server."""
    with LLM(model, dtype="float32", compiler="eager", max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def vectors(llm: LLM, prompts: Any, **params: Any) -> torch.Tensor:
    found = llm.embed(prompts, pooling_params=PoolingParams(**params), use_tqdm=False)
    return torch.tensor([one.outputs.embedding for one in found])


def received(reply: Any) -> torch.Tensor:
    assert [one.index for one in reply.data] == list(range(len(reply.data)))
    return torch.tensor([one.embedding for one in reply.data])


def refused(server: ServerProcess, body: Any, path: str = "/v1/embeddings") -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    response = HTTP.post(f"{server.url}{path}", content=content, headers=headers)
    assert response.status_code == 400, (response.status_code, response.text[:300])
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def metric(server: ServerProcess, name: str) -> float:
    text = HTTP.get(f"{server.url}/metrics").text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


def test_embeddings_equal_the_offline_ones(client: openai.OpenAI, offline: LLM) -> None:
    """In all forms of an input: a text, several, token ids, several of these; the counts are of tokens."""
    several = texts(9)
    reply = client.embeddings.create(model="bert", input=several, encoding_format="float", user="me")
    torch.testing.assert_close(received(reply), vectors(offline, several))
    num_tokens = sum(len(one.prompt_token_ids) for one in offline.embed(several, use_tqdm=False))
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == num_tokens
    assert (reply.object, reply.model, reply.data[0].object) == ("list", "bert", "embedding")
    forms: list[Any] = ["the cat", [2, 5, 6, 3], [[2, 5, 3], [2, 7, 8, 3]]]
    for form in forms:
        found = received(client.embeddings.create(model="bert", input=form))
        torch.testing.assert_close(found, vectors(offline, form))


def test_the_forms_of_an_embedding(client: openai.OpenAI, server: ServerProcess, offline: LLM) -> None:
    """base64 holds little-endian float32, the same bits as the numbers; dimensions, length and special tokens."""
    expected = HTTP.post(f"{server.url}/v1/embeddings", json={"input": "the fox"}).json()["data"][0]["embedding"]
    body = {"input": "the fox", "encoding_format": "base64"}
    encoded = HTTP.post(f"{server.url}/v1/embeddings", json=body).json()["data"][0]["embedding"]
    raw = base64.b64decode(encoded)
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == expected
    short = received(client.embeddings.create(model="bert", input="the fox", dimensions=8))
    torch.testing.assert_close(short, vectors(offline, "the fox", dimensions=8))
    plain = client.embeddings.create(model="bert", input="the fox", extra_body={"normalize": False})
    torch.testing.assert_close(received(plain), vectors(offline, "the fox", normalize=False))
    bare = client.embeddings.create(model="bert", input="the fox", extra_body={"add_special_tokens": False})
    assert bare.usage.prompt_tokens == 2


def test_a_text_that_is_too_long(server: ServerProcess, client: openai.OpenAI, offline: LLM) -> None:
    """It is refused with its length, the limit and its place; or cut, if that is asked for."""
    long = "the cat " * 50
    error = refused(server, {"input": ["the cat", long]})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert error["message"].startswith(f"input[1] has 102 tokens, and the model takes at most {MAX_LEN}.")
    assert refused(server, {"input": [5] * 65})["code"] == "context_length_exceeded"
    assert refused(server, {"input": "cat " * 1_000_000})["code"] == "context_length_exceeded"
    for wanted, num_tokens in ((-1, MAX_LEN), (10, 10)):
        reply = client.embeddings.create(model="bert", input=long, extra_body={"truncate_prompt_tokens": wanted})
        assert reply.usage.prompt_tokens == num_tokens
        torch.testing.assert_close(received(reply), vectors(offline, long, truncate_prompt_tokens=wanted))


MALFORMED: list[tuple[Any, str]] = [
    (b"", "Field required"),
    (b"{", "JSON"),
    (b"[1]", ""),
    ({}, "input"),
    ({"input": None}, "it is None"),
    ({"input": 7}, "it is 7"),
    ({"input": {"text": "a"}}, "it is {'text': 'a'}"),
    ({"input": []}, "input is an empty list"),
    ({"input": [[]]}, "input[0]: the prompt has no tokens"),
    ({"input": [[5], []]}, "input[1]: the prompt has no tokens"),
    ({"input": ""}, "the prompt is empty"),
    ({"input": ["a", ""]}, "input[1]: the prompt is empty"),
    ({"input": ["a", None]}, "input[1] is None"),
    ({"input": ["a", 7]}, "input[1] is 7, and input[0] is 'a'"),
    ({"input": [True]}, "input[0] is True"),
    ({"input": [1.5]}, "input[0] is 1.5"),
    ({"input": [[5, "a"]]}, "input[0][1] is 'a'"),
    ({"input": [[5, [6]]]}, "input[0][1] is [6]"),
    ({"input": [-1]}, f"token id -1 is not in the vocabulary (0 to {VOCAB_SIZE - 1})"),
    ({"input": [[5], [VOCAB_SIZE]]}, f"input[1]: token id {VOCAB_SIZE} is not in the vocabulary"),
    ({"input": [10**40]}, "input"),
    ({"input": "\ud800"}, "not valid Unicode"),
    ({"input": ["a"] * 2049}, "input has 2049 texts; give at most 2048"),
    ({"input": "a", "dimensions": 0}, "dimensions=0"),
    ({"input": "a", "dimensions": 9}, "dimensions=9; the model was trained for 8, 16"),
    ({"input": "a", "dimensions": True}, "dimensions"),
    ({"input": "a", "dimensions": 8.5}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "normalize": "perhaps"}, "normalize"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens=-2"),
    ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens=65, but the model takes at most 64"),
    ({"input": [5], "truncate_prompt_tokens": 1}, "truncate_prompt_tokens is for texts"),
    ({"input": "a", "dimension": 8}, "unknown field 'dimension'. Did you mean 'dimensions'?"),
    ({"input": "a", "messages": [{"role": "user"}]}, "messages is not available here"),
    (b'{"input": "a", "dimensions": NaN}', "dimensions"),
    (b'{"input": [NaN]}', "input[0] is nan"),
]


def test_malformed_bodies_are_refused(server: ServerProcess, client: openai.OpenAI) -> None:
    """Each gets status 400 in the API's shape, says what is wrong, and the server answers afterwards."""
    for body, message in MALFORMED:
        assert message in refused(server, body)["message"], body
    assert client.embeddings.create(model="bert", input="a").data
    assert "Traceback" not in server.log


def test_nothing_is_generated(server: ServerProcess, client: openai.OpenAI) -> None:
    """Completions of any body get status 400; the model's card, tokens and health are those of any server."""
    for path in ("/v1/chat/completions", "/v1/completions"):
        for body in ({}, {"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": "Hi"}, b"{"):
            assert "completions are not available" in refused(server, body, path)["message"]
    assert client.models.retrieve("bert").model_extra is not None
    with pytest.raises(openai.NotFoundError, match="Did you mean 'bert'"):
        client.embeddings.create(model="brt", input="a")
    tokens = HTTP.post(f"{server.url}/tokenize", json={"prompt": "the cat"}).json()
    assert (tokens["count"], tokens["max_model_len"]) == (4, MAX_LEN)
    text = HTTP.post(f"{server.url}/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert "the cat" in text["prompt"]
    refused(server, {"tokens": [VOCAB_SIZE]}, "/detokenize")
    assert HTTP.get(f"{server.url}/ready").json() == {"status": "serving", "start": "full speed"}
    assert HTTP.get(f"{server.url}/health").status_code == 200


def test_many_requests_at_once_equal_their_offline_answers(server: ServerProcess, offline: LLM) -> None:
    """No embedding is lost or mixed up, and the texts of different requests share steps."""
    several = texts(48, seed=3)
    expected = vectors(offline, several)

    async def embed_all() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            requests = [client.embeddings.create(model="bert", input=several[n : n + 2]) for n in range(0, 48, 2)]
            return await asyncio.gather(*requests)

    found = torch.cat([received(reply) for reply in asyncio.run(embed_all())])
    torch.testing.assert_close(found, expected)


def test_a_request_of_more_texts_than_places(client: openai.OpenAI, offline: LLM) -> None:
    """It runs in parts, so the queue's bound refuses no list that the API allows."""
    several = texts(200, seed=4)
    reply = client.embeddings.create(model="bert", input=several)
    torch.testing.assert_close(received(reply), vectors(offline, several))


def raw_request(server: ServerProcess, body: dict[str, Any]) -> socket.socket:
    content = json.dumps(body).encode()
    address = urlparse(server.url)
    connection = socket.create_connection((address.hostname or "", address.port or 80), timeout=60)
    head = (
        f"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection.sendall(f"{head}\r\n\r\n".encode() + content)
    return connection


def test_the_texts_of_a_client_that_goes_away_are_dropped(server: ServerProcess, client: openai.OpenAI) -> None:
    """Its 2048 texts do not run to their end, and its places are free again."""
    before = metric(server, "vllm:prompt_tokens_total")
    several = ["the cat " * 30] * 2048
    raw_request(server, {"input": several}).close()
    assert client.embeddings.create(model="bert", input="a").data
    deadline = time.monotonic() + 60
    while metric(server, "vllm:num_requests_running") or metric(server, "vllm:num_requests_waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert metric(server, "vllm:prompt_tokens_total") < before + 62 * 1024
    assert "Traceback" not in server.log


def test_sigterm_drains(server: ServerProcess) -> None:
    """The last test: the texts of a request that waits are pooled, new ones are refused, the process ends with 0."""
    before = metric(server, "vllm:prompt_tokens_total")
    with raw_request(server, {"input": ["the cat " * 30] * 400, "encoding_format": "base64"}) as running:
        while metric(server, "vllm:prompt_tokens_total") == before:
            time.sleep(0.005)
        with raw_request(server, {"input": ["the cat " * 30] * 2048}):  # until this ends, the process does not
            server.process.send_signal(signal.SIGTERM)
            while HTTP.get(f"{server.url}/ready").status_code == 200:
                time.sleep(0.005)
            response = HTTP.post(f"{server.url}/v1/embeddings", json={"input": "a"})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
        reply = b""
        while part := running.recv(1 << 16):
            reply += part
    assert reply.startswith(b"HTTP/1.1 200")
    assert reply.count(b'"object":"embedding"') == 400
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.log


def test_an_embedding_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(ApiError, match="text 1 has values that are not finite"):
        embedding_data([torch.ones(2), torch.tensor([1.0, float("nan")])], is_base64=False)
