"""A stand-in for the runner's `LLM`, so that the command line is tested without a model."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from piecegraph.progress import OnPhase, Phase
from piecegraph.runner.common.outputs import CompletionOutput, RequestOutput
from piecegraph.runner.common.sampling_params import SamplingParams


@dataclass(frozen=True)
class FakeReport:
    num_pieces: int = 61
    num_unique_pieces: int = 3
    trace_seconds: float = 1.5
    compile_seconds: float = 4.25


class FakeCompiled:
    def report(self) -> FakeReport:
        return FakeReport()


class FakeTokenizer:
    chat_template: str | None = "a template"

    def get_chat_template(self, chat_template: str | None = None, tools: object = None) -> str | None:
        return chat_template or self.chat_template

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return "".join(f"<user>{message['content']}" for message in messages)

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [len(text)]}


class FakeLLM:
    """A stand-in for `LLM` that answers "Paris is nice." in three steps and remembers its arguments and requests."""

    made: ClassVar[list[FakeLLM]] = []
    words: ClassVar[tuple[str, ...]] = ("Paris", " is", " nice.")
    tokenizer: ClassVar[FakeTokenizer] = FakeTokenizer()
    raises: ClassVar[BaseException | None] = None
    raises_in_stream: ClassVar[BaseException | None] = None

    def __init__(self, model: str | None = None, *, on_phase: OnPhase | None = None, **arguments: Any) -> None:
        self.model = model
        self.arguments = arguments
        self.asked: list[tuple[Any, SamplingParams]] = []
        self.notes = ("a note",)
        self.compiled = FakeCompiled()
        self.report = self.compiled.report()
        self.engine = SimpleNamespace(stats=SimpleNamespace(speculation=None))
        self.closed = False
        if self.raises is not None:
            raise self.raises
        FakeLLM.made.append(self)
        assert on_phase is not None
        on_phase(Phase(name="import", seconds=1.25))
        on_phase(Phase(name="load", seconds=0.5))
        on_phase(Phase(name="compile", done=1, total=3))
        on_phase(Phase(name="compile", seconds=4.25, detail="3 unique"))

    def stream(self, prompts: Any, sampling_params: SamplingParams) -> Iterator[RequestOutput]:
        self.asked.append((prompts, sampling_params))
        for count in range(1, len(self.words) + 1):
            done = count == len(self.words)
            completion = CompletionOutput(
                index=0,
                text="".join(self.words[:count]),
                token_ids=list(range(count)),
                finish_reason="stop" if done else None,
            )
            yield RequestOutput(
                request_id="0", prompt=None, prompt_token_ids=[7, 8], finished=done, outputs=[completion]
            )
            if self.raises_in_stream is not None:
                raise self.raises_in_stream

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """A replacement of `piecegraph.runner.llm.LLM` by `FakeLLM`; nothing heavy is imported."""
    module = types.ModuleType("piecegraph.runner.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "piecegraph.runner.llm", module)
    monkeypatch.setattr("piecegraph.tools.command_line.quiet.quiet_libraries", lambda: None)
    monkeypatch.setattr(FakeLLM, "made", [])
    return FakeLLM


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove our settings from the environment that the tests run in."""
    from piecegraph import environment

    for name in environment.piecegraph_variables():
        monkeypatch.delenv(name)
