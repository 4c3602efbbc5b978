"""The connection between the stages of a pipeline: hidden states from each to the next, tokens from the last to all.

The ranks of one line have the same place within their stages. Hidden states and tokens have a process group each, so
that neither waits for the other: tokens of one batch are on their way while hidden states of the next are sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from piecegraph.passes.ops.collectives import CollectiveError
from piecegraph.runner.pipeline_parallel.stage import Stage


class StageLink:
    """One rank's connection to the other stages, over gloo. A transfer that fails raises `CollectiveError`.

    Everything that is sent is received: each stage sends and receives for every step, in the order of steps.
    """

    def __init__(self, store: dist.Store, stage: Stage, timeout_s: float, *, address: str = "127.0.0.1") -> None:
        """Store the parts.

        `timeout_s`: how long a transfer waits for the other stage. `address`: where others reach this process.
        """
        self._stage = stage
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._address = address
        self._hidden: Any = None
        self._tokens: Any = None
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()  # transfers that may not have ended, with what they read

    def connect(self) -> None:
        """Connect all stages, which have to call this at about the same time."""
        self._hidden = self._group("hidden states", num_threads=2)
        self._tokens = self._group("tokens", num_threads=self._stage.num_stages + 1)

    def send_hidden(self, hidden_states: torch.Tensor) -> None:
        """Send hidden states to the next stage, without waiting for it. They are copied."""
        kept = hidden_states.clone(memory_format=torch.contiguous_format)
        self._keep(self._start(lambda: self._hidden.send([kept], self._stage.index + 1, 0)), kept)

    def receive_hidden(self, out: torch.Tensor) -> None:
        """Wait for the hidden states of the preceding stage, and write them to `out`, which is contiguous."""
        self._wait(self._start(lambda: self._hidden.recv([out], self._stage.index - 1, 0)))

    def send_tokens(self, values: torch.Tensor) -> None:
        """Send int64 `values` of the last stage to all others, without waiting for them."""
        self._keep(self._broadcast(values), values)

    def expect_tokens(self, num_values: int) -> Callable[[], torch.Tensor]:
        """Return a function that waits for the next values that the last stage sends, `[num_values]` int64."""
        values = torch.empty(num_values, dtype=torch.int64)
        work = self._broadcast(values)

        def wait() -> torch.Tensor:
            self._wait(work)
            return values

        return wait

    def send_bytes(self, content: bytes) -> None:
        """Send bytes from the last stage to the first, without waiting for it."""
        kept = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._keep(self._start(lambda: self._tokens.send([kept], 0, 1)), kept)

    def receive_bytes(self, count: int) -> bytes:
        """Wait for `count` bytes that the last stage sends to the first."""
        received = torch.empty(count, dtype=torch.uint8)
        self._wait(self._start(lambda: self._tokens.recv([received], self._stage.num_stages - 1, 1)))
        return received.numpy().tobytes()

    def close(self) -> None:
        """Close the connections, which makes transfers of other stages fail. Idempotent."""
        groups = [group for group in (self._hidden, self._tokens) if group is not None]
        self._hidden = self._tokens = None
        for group in groups:
            group.abort()
        self._sent.clear()

    def _group(self, name: str, *, num_threads: int) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._timeout
        options._threads = num_threads
        options._devices = [gloo.create_device(hostname=self._address)]
        return gloo(dist.PrefixStore(name, self._store), self._stage.index, self._stage.num_stages, options)

    def _broadcast(self, values: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = self._stage.num_stages - 1
        options.rootTensor = 0
        return self._start(lambda: self._tokens.broadcast([values], options))

    def _keep(self, work: Any, tensor: torch.Tensor) -> None:
        """Keep what a transfer reads until it has ended."""
        self._sent.append((work, tensor))
        while self._sent and self._sent[0][0].is_completed():
            self._wait(self._sent.popleft()[0])

    def _start(self, start: Callable[[], Any]) -> Any:
        if self._hidden is None:
            raise CollectiveError("this connection of stages is closed.")
        try:
            return start()
        except RuntimeError as error:
            raise CollectiveError(str(error).partition("\n")[0]) from error

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(str(error).partition("\n")[0]) from error
