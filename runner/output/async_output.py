"""A step's output on its way to the host: the copy is waited for only when the output is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from piecegraph.compiler.common.cuda_driver import StagedHostCopy
from piecegraph.runner.sampling.logprobs import LogprobsTensors
from piecegraph.runner.scheduling.scheduler_output import SampledTokens


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position."""

    token_ids: Sequence[int]  # the token itself, then the likeliest tokens, likeliest first
    logprobs: Sequence[float]
    rank: int  # of the token itself, from 1


class PromptLogprobs(NamedTuple):
    """Log probabilities of some of a prompt's tokens."""

    start: int  # position of the first
    positions: Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """The output of a step, by request id."""

    token_ids: SampledTokens  # of the requests that sampled
    logprobs: Mapping[str, TokenLogprobs]  # of these tokens, for requests that ask for them
    prompt_logprobs: Mapping[str, PromptLogprobs]
    errors: Mapping[str, BaseException] | None = None  # of requests that end with an error, without a token

    @property
    def logprob_rows(self) -> Mapping[str, Sequence[TokenLogprobs]]:
        """The log probabilities of all tokens of each request."""
        return {request_id: (row,) for request_id, row in self.logprobs.items()}


class PromptRows(NamedTuple):
    """The rows of a step's prompt log probabilities that belong to one request."""

    request_id: str
    start: int  # position of the token of the first row
    num_rows: int


class OutputStream:
    """A stream for copies to the host, so that the next step need not wait for them.

    Token ids alone, the output of most steps, go through memory and events that are reused: a step allocates
    none. There are as many of these slots as copies were ever unread at once, two or three.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots: list[_Slot] = []  # all slots: this is the only reference to those in use
        self._free: list[_Slot] = []

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """Start to copy `tensors` in the current stream's order; they may be overwritten right after.

        All tensors go to pinned memory in one copy; those of 8-byte dtypes come first.
        """
        if len(tensors) == 1 and tensors[0].dtype == torch.int64 and tensors[0].ndim == 1 and tensors[0].stride(0) == 1:
            return self._tokens_to_host(tensors[0])
        layout = [(tensor.dtype, tensor.shape) for tensor in tensors]
        kept = torch.cat([_as_bytes(tensor) for tensor in tensors])
        if self._stream is None:
            return HostCopy(kept, layout, None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=True)
            host.copy_(kept, non_blocking=True)
            kept.record_stream(self._stream)
            done = torch.cuda.Event()
            done.record(self._stream)
        return HostCopy(host, layout, done)

    def close(self) -> None:
        """Wait for all copies, because their memory is freed with this object. Idempotent."""
        if self._stream is not None:
            self._stream.synchronize()

    def _tokens_to_host(self, token_ids: torch.Tensor) -> HostCopy:
        num_values = token_ids.shape[0]
        slot = self._slot(num_values)
        if slot.copies is None:
            slot.kept.copy_(token_ids)
        else:  # calls of the driver: those of torch took as long as launching the model
            stream = torch.cuda.current_stream(self._device).cuda_stream
            slot.copies.start(token_ids.data_ptr(), 8 * num_values, stream)
        return HostCopy(slot.host, [(torch.int64, slot.host.shape)], slot.is_copied, lambda: self._free.append(slot))

    def _slot(self, num_values: int) -> _Slot:
        """Return a free slot for `num_values` values.

        Nothing reads or writes a free slot: the copy out of it was waited for before its values were read. A slot whose
        values are never read, because of an error, is never free again.
        """
        while self._free:
            slot = self._free.pop()
            if slot.capacity >= num_values:
                slot.set_num_values(num_values)
                return slot
        slot = _Slot(max(SMALLEST_SLOT, 1 << (num_values - 1).bit_length()), self._device, self._stream)
        self._slots.append(slot)
        slot.set_num_values(num_values)
        return slot


SMALLEST_SLOT = 256


class _Slot:
    """Memory for a copy of up to `capacity` int64, on the device and on the host; on a CPU both are the same."""

    def __init__(self, capacity: int, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self.capacity = capacity
        self.copies: StagedHostCopy | None = None
        self._all_kept = self._all_host = torch.empty(capacity, dtype=torch.int64, device=device)
        self.is_copied: torch.cuda.Event | None = None
        if stream is not None:
            self._all_host = torch.empty(capacity, dtype=torch.int64, pin_memory=True)
            self._is_kept, self.is_copied = torch.cuda.Event(), torch.cuda.Event()
            for event in (self._is_kept, self.is_copied):
                event.record(stream)  # creates the CUDA event
            self.copies = StagedHostCopy(
                kept=self._all_kept.data_ptr(),
                host=self._all_host.data_ptr(),
                is_kept=self._is_kept.cuda_event,
                is_copied=self.is_copied.cuda_event,
                copy_stream=stream.cuda_stream,
            )
        self._num_values = -1
        self.set_num_values(capacity)

    def set_num_values(self, count: int) -> None:
        """Make `kept` and `host` views `[count]`; they mostly are already."""
        if count != self._num_values:
            self._num_values = count
            self.kept = self._all_kept[:count]
            self.host = self._all_host[:count]


class HostCopy:
    """Tensors on their way to the host."""

    def __init__(
        self,
        packed: torch.Tensor,
        layout: Sequence[tuple[torch.dtype, torch.Size]],
        done: torch.cuda.Event | None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Hold a copy that ends with `done` (None: it has ended).

        `packed`: the bytes of tensors with the dtypes and shapes in `layout`, or the only tensor itself. `release` is
        called when they are no longer read.
        """
        self._packed = packed
        self._layout = layout
        self._done = done
        self._release = release

    @property
    def has_ended(self) -> bool:
        """Return whether `take` would not wait."""
        return self._done is None or self._done.query()

    def take(self) -> list[Any]:
        """Wait for the copy and return each tensor as nested lists. Call once only: then the memory is reused."""
        if self._done is not None:
            self._done.synchronize()
        values = [tensor.numpy().tolist() for tensor in self._tensors()]  # `Tensor.tolist` takes three times as long
        self._release()
        return values

    def _tensors(self) -> Sequence[torch.Tensor]:
        if self._packed.dtype != torch.uint8:
            return [self._packed]
        sizes = [dtype.itemsize * shape.numel() for dtype, shape in self._layout]
        parts = zip(self._packed.split(sizes), self._layout, strict=True)
        return [part.view(dtype).view(shape) for part, (dtype, shape) in parts]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class AsyncOutput:
    """A step's output that is still being computed or copied. `get` waits for it."""

    def __init__(
        self,
        stream: OutputStream,
        *,
        request_ids: Sequence[str],
        token_ids: torch.Tensor | None,
        rows: Sequence[int] | None = None,
        logprobs: LogprobsTensors | None = None,
        prompt_rows: Sequence[PromptRows] = (),
        prompt_logprobs: LogprobsTensors | None = None,
        errors: Mapping[str, BaseException] | None = None,
    ) -> None:
        """Start the copy.

        `request_ids`: the requests that sampled. `rows`: their rows of `token_ids` and `logprobs`; None: in order.
        """
        self._request_ids = request_ids
        self._rows = rows
        self._prompt_rows = prompt_rows
        self._errors = errors
        self._has_logprobs = logprobs is not None
        self._has_token_ids = token_ids is not None
        tensors = [] if token_ids is None else [token_ids]
        tensors += [*(logprobs or ()), *(prompt_logprobs or ())]
        self._copy = stream.to_host(tensors) if tensors else None
        self._output: ModelRunnerOutput | None = None

    @property
    def is_there(self) -> bool:
        """Return whether `get` would not wait."""
        return self._output is not None or self._copy is None or self._copy.has_ended

    def get(self) -> ModelRunnerOutput:
        """Wait until the step has run and its output is copied, and return it. May be called again."""
        if self._output is None:
            values = [] if self._copy is None else self._copy.take()
            tokens = values.pop(0) if self._has_token_ids else []
            logprobs = [values.pop(0) for _ in range(3)] if self._has_logprobs else None
            self._output = self._make_output(tokens, logprobs, self._prompts(values))
        return self._output

    def _make_output(
        self,
        token_ids: list[int],
        logprobs: Sequence[list[Any]] | None,
        prompt_logprobs: Mapping[str, PromptLogprobs],
    ) -> ModelRunnerOutput:
        """Return the output of what was copied; `logprobs` are the columns of `LogprobsTensors`."""
        request_ids, rows = self._request_ids, self._rows
        return ModelRunnerOutput(
            token_ids=SampledTokens(request_ids, token_ids if rows is None else [token_ids[row] for row in rows]),
            logprobs={}
            if logprobs is None
            else {
                request_id: token_logprobs(logprobs, row)
                for request_id, row in zip(request_ids, rows or range(len(request_ids)), strict=True)
            },
            prompt_logprobs=prompt_logprobs,
            errors=self._errors,
        )

    def _prompts(self, columns: Sequence[list[Any]]) -> dict[str, PromptLogprobs]:
        found = {}
        first = 0
        for request_id, start, num_rows in self._prompt_rows:
            rows = [token_logprobs(columns, row) for row in range(first, first + num_rows)]
            found[request_id] = PromptLogprobs(start, rows)
            first += num_rows
        return found


def token_logprobs(columns: Sequence[list[Any]], row: int) -> TokenLogprobs:
    """Return a row of the columns of `LogprobsTensors`, as lists."""
    token_ids, logprobs, ranks = columns
    return TokenLogprobs(token_ids[row], logprobs[row], ranks[row])
