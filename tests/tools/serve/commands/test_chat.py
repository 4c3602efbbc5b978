"""Conversations: each question is answered with all that was said before it."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from piecegraph import LLM, SamplingParams
from piecegraph.errors import ConfigError, RequestError
from piecegraph.tools.cli import main
from piecegraph.tools.serve.commands.chat import Messages, ServerUnreachable, answers_of_server, talk
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.tiny_models import llama_config, random_model, save
from tests.tools.serve.serving import PROGRAM, running_server

pytestmark = pytest.mark.usefixtures("models_are_traced_once")


def says(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_conversation_has_a_history(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`/undo` takes a question and its answer back, `/new` all of them; the system's message stays."""
    asked: list[list[str]] = []

    def answer(messages: Messages) -> Iterator[str]:
        asked.append([f"{one['role'][0]}:{one['content']}" for one in messages])
        yield from ("an", "swer")

    says(monkeypatch, "one", "", "two", "/undo", "three", "/what", "/new", "four", "/exit", "five")
    talk(answer, "be brief", quiet=True)
    assert asked == [
        ["s:be brief", "u:one"],
        ["s:be brief", "u:one", "a:answer", "u:two"],
        ["s:be brief", "u:one", "a:answer", "u:three"],
        ["s:be brief", "u:four"],
    ]
    printed = capsys.readouterr()
    assert printed.out == "answer\n" * 4
    assert printed.err == "there is no /what; there are /new, /undo and /exit.\n"


def test_a_question_that_is_refused_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def answer(messages: Messages) -> Iterator[str]:
        asked.append(len(messages))
        if len(asked) == 1:
            raise RequestError("it is too long.")
        yield "yes"

    says(monkeypatch, "one", "two")
    talk(answer, None, quiet=True)
    assert asked == [1, 1]
    assert capsys.readouterr() == ("yes\n", "error: it is too long.\n")


class _Server(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that repeats the last question, and refuses one."""

    bodies: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self._reply(200, json.dumps({"data": [{"id": "first"}, {"id": "second"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.keys.append(self.headers["Authorization"])
        question = body["messages"][-1]["content"]
        if question == "refuse":
            self._reply(400, json.dumps({"error": {"message": "no."}}))
            return
        deltas: list[dict[str, str]] = [{"role": "assistant"}, {"content": "you said "}, {"content": question}, {}]
        events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
        self._reply(200, "".join(f"data: {event}\n\n" for event in (*events, "[DONE]")))

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Server)
    _Server.bodies, _Server.keys = [], []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_answers(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its first model is asked, with the sampling options and the key; what it refuses is told."""
    monkeypatch.setenv("PIECEGRAPH_API_KEY", "secret")
    says(monkeypatch, "hello", "refuse", "again")
    assert main(["chat", "--url", f"{url}/v1/", "--temperature", "0.5"]) == 0
    assert capsys.readouterr() == ("you said hello\nyou said again\n", "error: no.\n")
    last = _Server.bodies[-1]
    assert (last["model"], last["temperature"], last["max_tokens"], last["stream"]) == ("first", 0.5, 512, True)
    assert [one["content"] for one in last["messages"]] == ["hello", "you said hello", "again"]
    assert set(_Server.keys) == {"Bearer secret"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama over the byte tokenizer's vocabulary, which has a chat template."""
    config = llama_config(vocab_size=261, eos_token_id=1, max_position_embeddings=512)
    folder = save(random_model(config), tmp_path_factory.mktemp("llama"))
    byte_tokenizer().save_pretrained(str(folder))
    return folder


GREEDY = ["--temperature", "0", "--max-tokens", "6"]
QUESTIONS = ("the end", "and then?", "/undo", "why?")


def answers_by_hand(model: Path) -> list[str]:
    """Return what the questions are answered with, each prompt written out."""
    with LLM(model, device="cpu", dtype="float32", compiler="eager", max_num_seqs=1) as llm:

        def answer(prompt: str) -> str:
            params = SamplingParams(temperature=0, max_tokens=6)
            return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text

        first = answer("<user>the end<assistant>")
        history = f"<user>the end<assistant>{first}"
        return [first, answer(f"{history}<user>and then?<assistant>"), answer(f"{history}<user>why?<assistant>")]


def test_a_model_of_this_process_answers(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what was said before, as the chat template writes it."""
    monkeypatch.setattr("piecegraph.tools.command_line.quiet.quiet_libraries", lambda: None)
    expected = answers_by_hand(model)
    capsys.readouterr()
    says(monkeypatch, *QUESTIONS)
    flags = ["--device", "cpu", "--dtype", "float32", "--compiler", "eager", "--quiet"]
    assert main(["chat", str(model), *GREEDY, *flags]) == 0
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)


@pytest.mark.slow
def test_a_conversation_in_a_terminal_with_a_real_server(model: Path) -> None:
    """Through a pseudo-terminal, as a person has it: a prompt for each question, the answers, and code 0 at its end."""
    expected = answers_by_hand(model)
    master, terminal = pty.openpty()
    with running_server(model) as server:
        process = subprocess.Popen(
            [*PROGRAM, "chat", "--url", server.url, *GREEDY], stdin=terminal, stdout=terminal, stderr=terminal
        )
        os.close(terminal)
        shown = b""
        for question in (*QUESTIONS, "/exit"):
            seen = len(shown)
            while len(shown) == seen or not shown.endswith(b"> "):
                shown += os.read(master, 65536)
            os.write(master, f"{question}\n".encode())
        assert process.wait(60) == 0
        assert server.end() == 0
    os.close(master)
    text = shown.decode("utf-8", "replace").replace("\r\n", "\n")
    for question, answer in zip((QUESTIONS[0], QUESTIONS[1], QUESTIONS[3]), expected, strict=True):
        assert f"> {question}\n{answer}\n" in text, text


def test_what_does_not_go_together_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1", "--device", "cpu"]) == 3
    assert "device is of a model in this process" in capsys.readouterr().err
    assert main(["chat", "--logprobs", "3"]) == 3
    assert "logprobs has no use in a conversation" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="must be an address"):
        answers_of_server("127.0.0.1:8000", None, {})
    with pytest.raises(ServerUnreachable, match="Start one with piecegraph serve"):
        answers_of_server("http://127.0.0.1:1", None, {})
