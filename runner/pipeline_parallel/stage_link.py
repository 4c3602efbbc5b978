"""The connection between the stages of a pipeline: hidden states from each to the next, tokens from the last to all.

The ranks of one line have the same place within their stages. Hidden states and tokens have a process group each, so
that neither waits for the other: tokens of one batch are on their way while hidden states of the next are sent.

Between GPUs hidden states go through NCCL, which transfers them on a stream of its own: work launched before a transfer
is waited for by that stream, and the transfer by work launched after it, so the host waits for neither. Tokens are on
the host when they are sent, since the first rank's scheduler wants them there, and go through gloo.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from piecegraph.passes.ops.collectives import CollectiveError
from piecegraph.runner.pipeline_parallel.connections import START_TIMEOUT_S, connect_in_thread, nccl_group, no_check
from piecegraph.runner.pipeline_parallel.stage import Stage

_CPU = torch.device("cpu")


class ExpectedTokens:
    """Values that are on their way from the last stage."""

    def __init__(self, values: torch.Tensor, work: Any, wait: Callable[[Any], None]) -> None:
        """`values` are written by the transfer `work`, which `wait` waits for."""
        self._values = values
        self._work = work
        self._wait = wait

    @property
    def is_there(self) -> bool:
        """Return whether `get` would not wait, also because the transfer has failed."""
        return bool(self._work.is_completed())

    def get(self) -> torch.Tensor:
        """Wait for the values, and return them. May be called again."""
        self._wait(self._work)
        return self._values


class StageLink:
    """One rank's connection to the other stages. A transfer that fails raises `CollectiveError`.

    Everything that is sent is received: each stage sends and receives for every step, in the order of steps.

    Between GPUs a transfer of hidden states waits for a lost stage until `close`; that the stage is lost is seen by
    those who wait for its tokens.
    """

    def __init__(
        self,
        store: dist.Store,
        stage: Stage,
        timeout_s: float,
        *,
        address: str = "127.0.0.1",
        check: Callable[[], None] = no_check,
    ) -> None:
        """Store the parts.

        `timeout_s`: how long a transfer waits for the other stage. `address`: where others reach this process.
        `check` is called while this rank waits for others in `connect`, and may raise.
        """
        self._stage = stage
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._address = address
        self._check = check
        self._hidden: Any = None
        self._tokens: Any = None
        self._lock = threading.Lock()  # over who takes the groups in order to close them
        self._failure: BaseException | None = None  # given to `fail`
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()  # transfers that may not have ended, with what they read
        self._sent_hidden: deque[Any] = deque()  # the last transfers of hidden states, one out of each buffer
        self._num_sent = 0  # batches of hidden states

    def connect(self, device: torch.device = _CPU) -> None:
        """Connect all stages, which have to call this at about the same time. `device`: where hidden states are."""
        connect_in_thread(lambda: self._connect(device), self._check)

    def _connect(self, device: torch.device) -> None:
        is_on_gpu = device.type == "cuda"
        self._tokens = self._group("tokens", num_threads=self._stage.num_stages + 1)
        if is_on_gpu:
            torch.cuda.set_device(device)  # of this thread
            store, timeout = dist.PrefixStore("hidden states", self._store), timedelta(seconds=START_TIMEOUT_S)
            self._hidden = nccl_group(store, self._stage.index, self._stage.num_stages, timeout, is_watched=True)
        else:
            self._hidden = self._group("hidden states", num_threads=2)
        self._make_connections(torch.zeros(1, device=device))
        if is_on_gpu:
            torch.cuda.synchronize(device)

    def _make_connections(self, value: torch.Tensor) -> None:
        """Pass a value through all stages, since NCCL connects two of them with their first transfer."""
        if not self._stage.is_first:
            self.receive_hidden(value)
        if not self._stage.is_last:
            self._wait(self._start(lambda: self._hidden.send([value], self._stage.index + 1, 0)))

    def send_hidden(self, hidden_states: torch.Tensor, buffers: torch.Tensor) -> None:
        """Send hidden states to the next stage, without waiting for it.

        They are copied to the next of `buffers` `[num_buffers, max_num_tokens, hidden_size]`, which are used in turn.
        A buffer is overwritten once it has been sent, which is waited for as in `receive_hidden`.
        """
        if len(self._sent_hidden) == len(buffers):
            self._wait(self._sent_hidden.popleft())
        kept = buffers[self._num_sent % len(buffers), : hidden_states.shape[0]]
        kept.copy_(hidden_states)
        self._sent_hidden.append(self._start(lambda: self._hidden.send([kept], self._stage.index + 1, 0)))
        self._num_sent += 1

    def receive_hidden(self, out: torch.Tensor) -> None:
        """Receive the hidden states of the preceding stage in `out`, which is contiguous.

        On a CPU this waits for them; on a GPU what is launched afterwards does.
        """
        self._wait(self._start(lambda: self._hidden.recv([out], self._stage.index - 1, 0)))

    def send_tokens(self, values: torch.Tensor) -> None:
        """Send int64 `values` of the last stage to all others, without waiting for them."""
        self._keep(self._broadcast(values), values)

    def expect_tokens(self, num_values: int) -> ExpectedTokens:
        """Return the next values that the last stage sends, `[num_values]` int64, as they will come."""
        values = torch.empty(num_values, dtype=torch.int64)
        return ExpectedTokens(values, self._broadcast(values), self._wait)

    def send_bytes(self, content: bytes) -> None:
        """Send bytes from the last stage to the first, without waiting for it."""
        kept = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._keep(self._start(lambda: self._tokens.send([kept], 0, 1)), kept)

    def receive_bytes(self, count: int) -> bytes:
        """Wait for `count` bytes that the last stage sends to the first."""
        received = torch.empty(count, dtype=torch.uint8)
        self._wait(self._start(lambda: self._tokens.recv([received], self._stage.num_stages - 1, 1)))
        return received.numpy().tobytes()

    def fail(self, error: BaseException) -> None:
        """Close the connections from another thread; this rank's transfers raise `error` from then on."""
        self._failure = error
        for close in self.take_connections():
            close()

    def close(self) -> None:
        """Close the connections, which makes transfers of other stages fail. Idempotent."""
        for close in self.take_connections():
            close()
        self._sent.clear()
        self._sent_hidden.clear()

    def take_connections(self) -> list[Callable[[], None]]:
        """Return what closes the connections, which are no longer this object's. Those of tokens come first.

        Others learn from them that this stage is lost, and the abort of a transfer between GPUs may take its time.
        """
        with self._lock:
            groups, self._tokens, self._hidden = (self._tokens, self._hidden), None, None
        return [group.abort for group in groups if group is not None]

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
            raise self._closed_error()
        try:
            return start()
        except (RuntimeError, AttributeError) as error:
            if self._hidden is None:  # closed by another thread
                raise self._closed_error() from error
            if isinstance(error, AttributeError):
                raise
            raise CollectiveError(str(error).partition("\n")[0]) from error

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failure or CollectiveError(str(error).partition("\n")[0]) from error

    def _closed_error(self) -> BaseException:
        return self._failure or CollectiveError("this connection of stages is closed.")
