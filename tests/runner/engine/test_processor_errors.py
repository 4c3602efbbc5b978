"""Logits processors that raise, return nonsense or call the engine end their own requests and no others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import LLM, AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, SamplingParams
from piecegraph.errors import RequestError, UsageError
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.engine.engine import Engine
from piecegraph.runner.output.output_processor import OutputProcessor
from tests.runner.test_graphs import load


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def recurse() -> None:
    recurse()


def raising(error: BaseException) -> Callable[..., Any]:
    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 2:
            raise error
        return logits

    return process


PROCESSES: dict[str, tuple[Any, str]] = {
    "ValueError": (raising(ValueError("boom")), "ValueError: boom"),
    "StopIteration": (raising(StopIteration()), "StopIteration"),
    "SystemExit": (raising(SystemExit(3)), "SystemExit: 3"),
    "GeneratorExit": (raising(GeneratorExit()), "GeneratorExit"),
    "MemoryError": (raising(MemoryError()), "MemoryError"),
    "no text": (raising(Unprintable()), "Unprintable: "),
    "recursion": (lambda output, logits: recurse(), "RecursionError"),
    "None": (lambda output, logits: None, "returned NoneType"),
    "list": (lambda output, logits: logits.tolist(), "returned list"),
    "short": (lambda output, logits: logits[:5], "must return [261]"),
    "scalar": (lambda output, logits: logits.max(), "must return [261]"),
    "two rows": (lambda output, logits: logits[None], "must return [261]"),
    "meta": (lambda output, logits: logits.to("meta"), "on meta"),
    "sparse": (lambda output, logits: logits.to_sparse(), "must be dense"),
    "longer output": (
        lambda output, logits: (output.append(5), logits)[1],
        "changed the length of a list of token ids",
    ),
    "not callable": (5, "TypeError"),
    "made badly": (None, "KeyError: 'new'"),
    "step": (lambda output, logits: ENGINES[-1].step(), "UsageError: a step is already running"),
}
ENGINES: list[Engine] = []


class PerRequest(AdapterLogitsProcessor):
    """Uses the function of `PROCESSES` that `extra_args["name"]` names, or that is `extra_args["call"]`."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if (sampling_params.extra_args or {}).get("name") == "refused":
            raise KeyError("refused")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        options = params.extra_args or {}
        if options.get("name") == "made badly":
            raise KeyError("new")
        return PROCESSES[options["name"]][0] if "name" in options else CALLS.get(options.get("call"))


CALLS: dict[str | None, Callable[..., Any]] = {}


class OfTheBatch(LogitsProcessor):
    """Raises in the method `fails_in`, once; then records the rows that it knows."""

    fails_in = ""
    serves: tuple[int, ...] | None = None
    rows: frozenset[int] = frozenset()

    def __init__(self, *arguments: Any) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self._fail("update_state")
        if batch_update is not None:
            rows = (set(OfTheBatch.rows) - set(batch_update.removed)) | {row for row, *_ in batch_update.added}
            for source, target, _ in batch_update.moved:
                rows = (rows - {source}) | {target}
            OfTheBatch.rows = frozenset(rows)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self._fail("apply")
        if not OfTheBatch.fails_in:
            assert OfTheBatch.rows == frozenset(range(len(logits)))
        return logits

    def served_rows(self) -> tuple[int, ...] | None:
        return self.serves

    def _fail(self, method: str) -> None:
        if self.fails_in == method:
            OfTheBatch.fails_in = "failed"
            raise RuntimeError("of the batch")


@pytest.fixture(scope="module")
def engine(llama_dir: Path) -> Iterator[Engine]:
    processors = [PerRequest, OfTheBatch]
    with load(llama_dir, logits_processors=processors, async_scheduling=False, max_num_seqs=4) as llm:
        ENGINES.append(llm.engine)
        yield llm.engine


def params(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, extra_args=options or None)


def drain(engine: Engine) -> dict[str, RequestOutput]:
    found: dict[str, RequestOutput] = {}
    for _ in range(40):
        if not engine.has_unfinished:
            break
        found |= {output.request_id: output for output in engine.step()}
    stats = engine.stats
    assert not engine.has_unfinished and stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks
    return found


def run(engine: Engine, bad: SamplingParams) -> dict[str, RequestOutput]:
    """Serve the request "bad" between two others."""
    engine.add_request("first", [1, 2, 3], params())
    engine.add_request("bad", [4, 5, 6], bad)
    engine.add_request("last", [9, 9, 4], params())
    return drain(engine)


@pytest.fixture(scope="module")
def undisturbed(engine: Engine) -> Mapping[str, list[int]]:
    return {name: list(output.outputs[0].token_ids) for name, output in run(engine, params()).items()}


def assert_others(found: Mapping[str, RequestOutput], undisturbed: Mapping[str, list[int]]) -> None:
    for name in ("first", "last"):
        (one,) = found[name].outputs
        assert (one.finish_reason, one.error, list(one.token_ids)) == ("length", None, undisturbed[name])


@pytest.mark.parametrize("name", PROCESSES)
def test_a_failing_function_ends_its_request_alone(
    engine: Engine, undisturbed: Mapping[str, list[int]], name: str
) -> None:
    """The request ends with the error; the tokens before the error stay."""
    found = run(engine, params(name=name))
    (one,) = found["bad"].outputs
    assert one.finish_reason == "error" and one.error is not None and PROCESSES[name][1] in one.error
    assert list(one.token_ids) == undisturbed["bad"][: len(one.token_ids)]
    assert_others(found, undisturbed)


def test_each_completion_fails_by_itself(engine: Engine, undisturbed: Mapping[str, list[int]]) -> None:
    two = SamplingParams(temperature=1.0, n=2, max_tokens=5, seed=1, extra_args={"name": "ValueError"})
    found = run(engine, two)
    assert [one.finish_reason for one in found["bad"].outputs] == ["error", "error"]
    assert_others(found, undisturbed)


def test_a_keyboard_interrupt_is_raised_and_its_step_is_computed_again(
    engine: Engine, undisturbed: Mapping[str, list[int]]
) -> None:
    interrupts = [KeyboardInterrupt()]

    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 2 and interrupts:
            raise interrupts.pop()
        return logits

    CALLS["interrupt"] = process
    engine.add_request("first", [1, 2, 3], params(call="interrupt"))
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    assert list(drain(engine)["first"].outputs[0].token_ids) == undisturbed["first"]


def test_calls_from_inside_a_step_are_refused_and_an_abort_waits_for_its_end(
    engine: Engine, undisturbed: Mapping[str, list[int]]
) -> None:
    refused = []

    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert "bad" in engine
        for call in (engine.step, lambda: engine.add_request("more", [1], params())):
            with pytest.raises(UsageError, match="a step is already running"):
                call()
            refused.append(call)
        if len(output) == 2:
            assert engine.abort("bad") is None
        return logits

    CALLS["engine"] = process
    found = run(engine, params(call="engine"))
    (one,) = found["bad"].outputs
    assert (one.finish_reason, list(one.token_ids)) == ("abort", undisturbed["bad"][:3])
    assert len(refused) == 6
    assert_others(found, undisturbed)


def test_calls_beside_another_threads_step_are_refused(engine: Engine, undisturbed: Mapping[str, list[int]]) -> None:
    """Such a call took the step for interrupted and computed everything anew beside it. Nothing is changed by it."""
    refused = []

    def elsewhere(call: Callable[[], Any]) -> None:
        with pytest.raises(UsageError, match="another thread is using the engine"):
            call()
        refused.append(call)

    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        for call in (engine.step, lambda: engine.add_request("more", [1], params()), lambda: engine.abort("bad")):
            thread = threading.Thread(target=elsewhere, args=(call,))
            thread.start()
            thread.join()
        return logits

    CALLS["thread"] = process
    found = run(engine, params(call="thread"))
    assert list(found["bad"].outputs[0].token_ids) == undisturbed["bad"]
    assert_others(found, undisturbed)
    assert len(refused) == 3 * len(undisturbed["bad"])


@pytest.mark.parametrize("method", ["update_state", "apply"])
def test_a_failing_batch_processor_ends_all_requests_of_the_step(
    engine: Engine, undisturbed: Mapping[str, list[int]], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later requests run, and the processor then knows the rows of the batch."""
    monkeypatch.setattr(OfTheBatch, "fails_in", method)
    found = run(engine, params())
    assert {one.outputs[0].error for one in found.values()} == {"RuntimeError: of the batch"}
    monkeypatch.setattr(OfTheBatch, "fails_in", "")
    found = run(engine, params())
    assert list(found["bad"].outputs[0].token_ids) == undisturbed["bad"]
    assert_others(found, undisturbed)


def test_a_failing_batch_processor_that_names_its_rows_ends_these_alone(
    engine: Engine, undisturbed: Mapping[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OfTheBatch, "fails_in", "apply")
    monkeypatch.setattr(OfTheBatch, "serves", (1, 7))
    found = run(engine, params())
    assert found["bad"].outputs[0].error == "RuntimeError: of the batch"
    assert_others(found, undisturbed)


def test_any_exception_of_validate_params_refuses_the_request(engine: Engine) -> None:
    with pytest.raises(RequestError, match="PerRequest refuses the sampling parameters: KeyError: 'refused'"):
        engine.add_request("bad", [1], params(name="refused"))
    assert not engine.has_unfinished


@pytest.mark.parametrize("request_id", [["a"], None, 3])
def test_an_id_that_is_no_string_cannot_be_aborted(engine: Engine, request_id: Any) -> None:
    with pytest.raises(RequestError, match="request_id=.*; it must be a string"):
        engine.abort(request_id)


def test_generate_inside_a_step_is_refused(llama_dir: Path) -> None:
    """`generate` returns all answers, the failed one with its error."""
    with load(llama_dir, logits_processors=[PerRequest], async_scheduling=False) as llm:
        inside: LLM = llm
        CALLS["generate"] = lambda output, logits: inside.generate([[1, 2]], params(), use_tqdm=False)
        bad, good = llm.generate([[4, 5, 6], [1, 2, 3]], [params(call="generate"), params()], use_tqdm=False)
        assert "UsageError: a step is already running" in (bad.outputs[0].error or "")
        assert good.outputs[0].finish_reason == "length"


def test_an_error_of_recovery_that_does_not_repeat_ends_no_request(
    engine: Engine, undisturbed: Mapping[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: dict[str, list[BaseException]] = {
        "take_token": [KeyboardInterrupt()],
        "_take_again": [RuntimeError("once")],
    }
    for name, once in errors.items():
        method = getattr(OutputProcessor, name)

        def fail_once(*arguments: Any, method: Any = method, once: list[BaseException] = once) -> Any:
            if once:
                raise once.pop()
            return method(*arguments)

        monkeypatch.setattr(OutputProcessor, name, fail_once)
    engine.add_request("first", [1, 2, 3], params())
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    assert list(drain(engine)["first"].outputs[0].token_ids) == undisturbed["first"]
    assert errors == {"take_token": [], "_take_again": []}
