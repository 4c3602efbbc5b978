"""Model runners of engines that share experts: all engines run each step at the same time, on as many tokens.

The number of tokens is agreed on by the first ranks; how an engine runs them is its own choice, since graphs and eager
pieces have the same collectives. So an engine without graphs for a batch does not take the others' from them.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.passes.ops.collectives import running_in
from piecegraph.runner.distributed.group_runner import GroupRunner, LeadingRunner
from piecegraph.runner.step.batch import Batch
from piecegraph.runner.step.without_grad import without_grad
from piecegraph.runner.tensor_parallel.engine_peers import Agreement

NO_REQUESTS = Batch(request_ids=(), query_lens=(), num_decode_reqs=0)

NUM_IDLE_LOGITS = 1
"""The rows of logits of a step without requests, which nobody reads: a model computes one at least."""


class LockstepRunner(GroupRunner):
    """The runner of a rank that is not its engine's first, and is told what was agreed on."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._channel: Connection | None = None
        self.agree = self._agree  # `ModelRunner` asks it in each step

    def hear(self, channel: Connection) -> None:
        """Take what was agreed on from the channel of the engine's first rank."""
        self._channel = channel

    @without_grad
    def run_idle(self) -> None:
        """Take part in a step in which this engine has no request."""
        num_tokens = self._largest(0)
        if num_tokens:
            dispatched = self.dispatcher.padded_to(num_tokens, num_reqs=0, uniform_token_count=1)
            with running_in(self.group):
                if dispatched.mode is not CUDAGraphMode.NONE:
                    self.run(NO_REQUESTS, dispatched)
                    return
                self._fill(NO_REQUESTS)
                self.step.prepare(num_tokens, 0)
                self.step.run_uncaptured(self._metadata(NO_REQUESTS, dispatched, ()), NUM_IDLE_LOGITS)

    def _agree(self, mode: CUDAGraphMode, num_tokens: int) -> tuple[CUDAGraphMode, int]:
        return mode, self._largest(num_tokens)

    def _largest(self, num_tokens: int) -> int:
        """Return how many tokens all engines compute in this step; 0: none."""
        assert self._channel is not None, "hear has not been called"
        name, agreed = self._channel.recv()
        assert name == "agreed", name
        return int(agreed)


class LeadingLockstepRunner(LeadingRunner, LockstepRunner):
    """The runner of an engine's first rank, which agrees with the first ranks of the other engines."""

    def __init__(self, *, agreement: Agreement, **parts: Any) -> None:
        super().__init__(**parts)
        self.agreement = agreement

    def run_idle(self) -> None:
        """Take part in a step in which this engine has no request, on all of its ranks."""
        with self.in_step():
            self.executor.send("idle")
            super().run_idle()

    def close(self) -> None:
        """Free the graphs, and end the other ranks. Idempotent."""
        super().close()
        self.agreement.close()

    def _largest(self, num_tokens: int) -> int:
        agreed = self.agreement.largest(num_tokens)
        self.executor.send("agreed", agreed)
        return agreed
