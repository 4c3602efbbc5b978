"""Functions on a CPU as lists of kernel calls: what becomes one, what does not, and what a replay does."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from piecegraph.compiler.graphs.recording.kernel_calls import record_calls
from piecegraph.compiler.graphs.recording.recorder import FunctionRecorder
from piecegraph.errors import CaptureError
from piecegraph.passes.kernels.common.cpp_kernel import INT, POINTER, CppKernel, recording_kernel_calls
from piecegraph.passes.ops.library import define_op

X = torch.arange(4.0)


class Doubling:
    """A kernel in Python that writes twice the numbers of `x` to `out`, and returns `failure`."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.failure = 0

    def __call__(self, x: int, out: int, size: int) -> int:
        self.num_calls += 1
        given, written = ((ctypes.c_float * size).from_address(each) for each in (x, out))
        for i in range(size):
            written[i] = 2 * given[i]
        return self.failure


KERNEL = CppKernel(Path("doubling.cpp"), "double", [POINTER, POINTER, INT])


def twice(x: torch.Tensor) -> torch.Tensor:
    if KERNEL.call is None or not x.is_contiguous():
        return x * 2
    out = torch.empty_like(x)
    KERNEL.run(x.data_ptr(), out.data_ptr(), x.numel())
    return out


TWICE = define_op("test_twice(Tensor x) -> Tensor", twice, torch.empty_like, is_recordable=True)
HIDDEN = define_op("test_hidden(Tensor x) -> Tensor", twice, torch.empty_like)  # may decide by numbers


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Doubling:
    made = Doubling()
    monkeypatch.setattr(KERNEL, "call", made)
    return made


def four_times(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    half = TWICE(x.view(2, 2))
    return TWICE(half[:, :].reshape(-1)), half


def test_calls_views_and_allocations_are_a_recording(kernel: Doubling) -> None:
    x = X.clone()
    recorded = record_calls(lambda: four_times(x))
    assert recorded is not None and len(recorded.calls) == kernel.num_calls == 2
    out, half = recorded.outputs
    for value in (1.0, -3.0):
        x.fill_(value)
        recorded.replay()
        assert torch.equal(out, 4 * x) and torch.equal(half.flatten(), 2 * x)
    assert kernel.num_calls == 6


def test_what_lies_between_two_calls_stays_as_long_as_they_are_made() -> None:
    x = X.clone()
    recorded = record_calls(lambda: (TWICE(TWICE(x)),))
    assert recorded is not None
    others = [torch.full((4,), 7.0) for _ in range(64)]  # would lie in memory that was freed
    recorded.replay()
    assert torch.equal(recorded.outputs[0], 4 * X) and all((other == 7.0).all() for other in others)


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another op": lambda x: TWICE(x) + 1,
    "an op of ours that may not be recorded": lambda x: HIDDEN(TWICE(x)),
    "a copy": lambda x: TWICE(x.view(2, 2).T.reshape(4)),
    "a copy inside of an op": lambda x: TWICE(x.view(2, 2).T),
    "a change in place": lambda x: TWICE(x).mul_(2),
    "a cast": lambda x: TWICE(x).to(torch.float64),
    "numbers of its own": lambda x: TWICE(torch.ones(4)),
    "a number on the host": lambda x: TWICE(x) if x.sum().item() > -1e9 else x,
    "a write into views": lambda x: TWICE(x)[:2].zero_(),
    "a copy into a buffer": lambda x: TWICE(x).copy_(x),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_function_that_computes_anything_else_is_none(name: str) -> None:
    assert record_calls(lambda: (OTHERS[name](X.clone()),)) is None


def test_an_op_that_torch_computes_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch computes our ops where there is no C++ compiler, and for shapes that a kernel does not take."""
    monkeypatch.setattr(KERNEL, "call", None)
    assert record_calls(lambda: (TWICE(X),)) is None


def test_calls_of_another_thread_are_not_recorded() -> None:
    with recording_kernel_calls() as calls:
        thread = threading.Thread(target=lambda: twice(X))
        thread.start()
        thread.join()
        assert not calls
        twice(X)
        assert len(calls) == 1
        with recording_kernel_calls() as inner:
            twice(X)
        assert len(inner) == len(calls) == 1
    twice(X)
    assert len(calls) == 1


def test_an_error_ends_the_recording() -> None:
    def fail() -> tuple[torch.Tensor, ...]:
        raise ValueError(TWICE(X))

    with pytest.raises(ValueError, match="tensor"):
        record_calls(fail)
    recorded = record_calls(lambda: (TWICE(X),))
    assert recorded is not None and len(recorded.calls) == 1


@pytest.mark.parametrize("dispatches_all", [False, True])
@pytest.mark.parametrize("function", [four_times, lambda x: (x + 1, TWICE(x))], ids=["calls", "others"])
def test_a_recorder_replays_either(
    function: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], dispatches_all: bool
) -> None:
    x, recorder = X.clone(), FunctionRecorder()
    recording = recorder.record(lambda: function(x), dispatches_all=dispatches_all)
    assert recorder.used_bytes() == 2 * x.nbytes
    x.add_(1)
    recording.replay()
    for found, wanted in zip(recording.outputs, function(x), strict=True):
        assert torch.equal(found, wanted)
    recording.release()
    assert recorder.used_bytes() == 0
    with pytest.raises(CaptureError, match="was released"):
        recording.replay()


def test_code_that_torch_does_not_see_is_run_again(kernel: Doubling) -> None:
    """A recorder records calls only where it is told that there is no such code."""
    x, out, recorder = X.clone(), torch.empty(4), FunctionRecorder()

    def by_pointers() -> tuple[torch.Tensor, ...]:
        out.numpy()[:] = x.numpy() + 1
        return (out,)

    recording = recorder.record(by_pointers)
    x.add_(1)
    recording.replay()
    assert torch.equal(recording.outputs[0], x + 1)


def test_a_kernel_without_memory_is_an_error(kernel: Doubling) -> None:
    recorded = record_calls(lambda: (TWICE(X),))
    assert recorded is not None
    kernel.failure = 1
    with pytest.raises(MemoryError, match="a kernel of a recorded graph found no memory"):
        recorded.replay()
