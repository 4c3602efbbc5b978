"""A step's output says the same however late it is asked for, and whatever the step's tensors have become."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.output import async_output
from piecegraph.runner.output.async_output import AsyncOutput, OutputStream, PromptLogprobs, PromptRows, TokenLogprobs
from piecegraph.runner.sampling.logprobs import LogprobsTensors


def logprobs_of(num_rows: int, device: str, num_logprobs: int = 1) -> LogprobsTensors:
    """Numbers that tell their row: token 10 * row + column, its log probability minus that, rank row + 1."""
    rows, columns = torch.arange(num_rows).unsqueeze(1), torch.arange(num_logprobs + 1)
    token_ids = (10 * rows + columns).to(device, torch.int32)
    return LogprobsTensors(token_ids, -token_ids.float(), torch.arange(1, num_rows + 1, dtype=torch.int32).to(device))


def row_of(row: int) -> TokenLogprobs:
    first = 10 * row
    return TokenLogprobs([first, first + 1], [-first, -first - 1], row + 1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_output_holds_the_values_at_its_creation(device: str) -> None:
    """Rows that did not sample mean nothing and are left out; the tensors may be used again at once."""
    stream = OutputStream(torch.device(device))
    token_ids, logprobs = torch.tensor([5, 6, 7], device=device), logprobs_of(3, device)
    output = AsyncOutput(stream, request_ids=["a", "c"], rows=[0, 2], token_ids=token_ids, logprobs=logprobs)
    for tensor in (token_ids, *logprobs):
        tensor.fill_(99)
    found = output.get()
    assert found.token_ids == {"a": 5, "c": 7}
    assert found.logprobs == {"a": row_of(0), "c": row_of(2)}
    assert found.prompt_logprobs == {}
    assert output.get() is found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_prompt_rows_go_to_their_requests(device: str) -> None:
    """Request after request, each at the position of its first row; beside tokens of others."""
    output = AsyncOutput(
        OutputStream(torch.device(device)),
        request_ids=["a"],
        token_ids=torch.tensor([5], device=device),
        prompt_rows=[PromptRows("b", 1, 2), PromptRows("c", 9, 1)],
        prompt_logprobs=logprobs_of(3, device),
    ).get()
    assert (dict(output.token_ids), output.logprobs) == ({"a": 5}, {})
    assert output.prompt_logprobs == {
        "b": PromptLogprobs(1, [row_of(0), row_of(1)]),
        "c": PromptLogprobs(9, [row_of(2)]),
    }


def test_tokens_logprobs_and_prompt_logprobs_share_one_copy() -> None:
    output = AsyncOutput(
        OutputStream(torch.device("cpu")),
        request_ids=["a"],
        rows=[1],
        token_ids=torch.tensor([5, 6]),
        logprobs=logprobs_of(2, "cpu"),
        prompt_rows=[PromptRows("b", 1, 1)],
        prompt_logprobs=logprobs_of(1, "cpu"),
    ).get()
    assert (dict(output.token_ids), output.logprobs) == ({"a": 6}, {"a": row_of(1)})
    assert output.prompt_logprobs == {"b": PromptLogprobs(1, [row_of(0)])}


def test_a_step_that_samples_nothing_has_an_empty_output() -> None:
    """A chunk of a prompt."""
    output = AsyncOutput(OutputStream(torch.device("cpu")), request_ids=[], token_ids=None).get()
    assert (dict(output.token_ids), output.logprobs, output.prompt_logprobs) == ({}, {}, {})


def test_a_chunk_may_have_prompt_logprobs_only() -> None:
    output = AsyncOutput(
        OutputStream(torch.device("cpu")),
        request_ids=[],
        token_ids=None,
        prompt_rows=[PromptRows("b", 4, 1)],
        prompt_logprobs=logprobs_of(1, "cpu"),
    ).get()
    assert output.prompt_logprobs == {"b": PromptLogprobs(4, [row_of(0)])}


@pytest.mark.gpu
def test_starting_a_copy_does_not_wait() -> None:
    """The device may be busy for long; only `get` waits for it."""
    stream = OutputStream(torch.device("cuda"))
    AsyncOutput(stream, request_ids=["a"], token_ids=torch.tensor([1], device="cuda")).get()  # pinned memory is there
    token_ids = torch.tensor([4], device="cuda")
    token_ids += 1  # loads the kernel, which may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second or so
    token_ids += 1
    busy = torch.cuda.Event()
    busy.record()
    output = AsyncOutput(stream, request_ids=["a"], token_ids=token_ids)
    assert not busy.query()
    assert output.get().token_ids == {"a": 6}
    assert busy.query()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_outputs_that_are_on_their_way_share_no_memory(device: str) -> None:
    """Whatever their number and sizes, and in whatever order they are asked for."""
    stream = OutputStream(torch.device(device))
    token_ids = torch.arange(600, device=device)
    for _ in range(3):  # from the second on through the memory of the first
        outputs = []
        for size in (3, 600, 1, 256, 257):
            outputs.append(AsyncOutput(stream, request_ids=[str(i) for i in range(size)], token_ids=token_ids[:size]))
            token_ids += 1
        first = int(token_ids[0]) - 5
        for place in (4, 0, 2, 1, 3):
            tokens = outputs[place].get().token_ids.token_ids
            assert tokens == list(range(first + place, first + place + len(tokens)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_slots_are_reused_once_their_output_is_read(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = async_output._Slot

    def counted(capacity: int, on: torch.device, stream: torch.cuda.Stream | None) -> async_output._Slot:
        made.append(capacity)
        return make(capacity, on, stream)

    monkeypatch.setattr(async_output, "_Slot", counted)
    stream = OutputStream(torch.device(device))
    in_flight: list[AsyncOutput] = []
    for step in range(20):
        in_flight.append(AsyncOutput(stream, request_ids=["a"], token_ids=torch.tensor([step], device=device)))
        if len(in_flight) > 1:
            assert in_flight.pop(0).get().token_ids == {"a": step - 1}
    assert made == [async_output.SMALLEST_SLOT] * 2
