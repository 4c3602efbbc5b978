"""docs/generation.md and docs/examples/engine_loop.py: what they show runs, and what they list is all there is."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

import piecegraph
from docs.examples.engine_loop import Ask, HangUp, Inbox, Stop, main, read, serve
from piecegraph import LLM, SamplingParams
from piecegraph.errors import RequestError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "generation.md"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def inbox(llm: LLM) -> Iterator[Inbox]:
    """Return the inbox of a server that runs in a thread of its own."""
    inbox: Inbox = SimpleQueue()
    server = threading.Thread(target=serve, args=(llm, inbox))
    server.start()
    yield inbox
    inbox.put(Stop())
    server.join()
    assert not llm.engine.has_unfinished


def test_clients_are_answered_together(llm: LLM, inbox: Inbox) -> None:
    """Each client receives pieces that make up the text of its request run alone."""
    prompts = ("the first", "x", "a longer one, the third of them")
    asks = [Ask(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    for ask in asks:
        inbox.put(ask)
    pieces = [list(read(ask)) for ask in asks]
    inbox.put(Stop())
    alone = llm.generate(prompts, GREEDY)
    assert ["".join(parts) for parts in pieces] == [output.outputs[0].text for output in alone]
    assert all(len(parts) > 1 for parts in pieces)


def test_only_the_client_of_a_refused_request_gets_the_error(inbox: Inbox) -> None:
    good, bad = Ask("good", "x", GREEDY), Ask("bad", "x" * 96, GREEDY)
    inbox.put(bad)
    inbox.put(good)
    with pytest.raises(RequestError, match="the prompt has 96 tokens"):
        list(read(bad))
    assert "".join(read(good))


def test_a_client_that_disconnects_aborts_its_request(llm: LLM, inbox: Inbox) -> None:
    """The request of the client ends; an endless request ends when the server stops."""
    first = Ask("first", "x", dataclasses.replace(GREEDY, max_tokens=90))
    inbox.put(first)
    next(read(first))
    inbox.put(HangUp("first"))
    inbox.put(HangUp("nobody"))
    endless = Ask("endless", "x", dataclasses.replace(GREEDY, max_tokens=90))
    inbox.put(endless)
    next(read(endless))
    inbox.put(Stop())
    list(read(endless))
    assert not llm.engine.has_unfinished


@pytest.fixture
def tiny_default(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LLM()` is the tests' tiny model, on a CPU."""

    def tiny(**options: object) -> LLM:
        return LLM(llama_dir, dtype="float32", compiler="eager", device="cpu", max_num_seqs=8, num_kv_blocks=48)

    monkeypatch.setattr(piecegraph, "LLM", tiny)
    monkeypatch.setattr("docs.examples.engine_loop.LLM", tiny)


def test_the_example_runs_as_a_program(
    tiny_default: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["engine_loop.py"])
    main()
    out = capsys.readouterr().out
    assert all(start in out for start in ("The capital of France is", "Once upon a time", "To make bread"))


def test_the_code_of_the_page_runs(tiny_default: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Its blocks one after the other; two completions each for two prompts are the first four lines."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    out = capsys.readouterr().out
    assert len(blocks) == 4
    assert re.findall(r"^(\d) (?:length|stop) ['\"]", out, re.MULTILINE) == ["0", "1"] * 2
    assert re.search(r"^b \[(\d+(, )?){4}\] True$", out, re.MULTILINE)
    assert not re.search(r"^a .* True$", out, re.MULTILINE)  # it was aborted


def test_the_page_lists_every_field_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    fields = {field.name: repr(field.default) for field in dataclasses.fields(SamplingParams)}
    assert dict(rows) == fields and len(rows) == len(fields)
