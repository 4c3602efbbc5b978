"""Conversations: each question is answered with all that was said before it."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from piecegraph.errors import ConfigError, RequestError
from piecegraph.tools.cli import main
from piecegraph.tools.serve.commands.chat import Messages, ServerUnreachable, answers_of_server, talk


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


def test_what_does_not_go_together_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1", "--device", "cpu"]) == 3
    assert "device is of a model in this process" in capsys.readouterr().err
    assert main(["chat", "--logprobs", "3"]) == 3
    assert "logprobs has no use in a conversation" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="must be an address"):
        answers_of_server("127.0.0.1:8000", None, {})
    with pytest.raises(ServerUnreachable, match="Start one with piecegraph serve"):
        answers_of_server("http://127.0.0.1:1", None, {})
