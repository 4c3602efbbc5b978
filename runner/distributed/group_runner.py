"""Model runners of an engine with several ranks: they run the same steps at the same time.

With drafts, every rank has the tokens of all requests and the same logits, so each finds the same drafts by prompt
lookup and decides alike; as without drafts, no token travels. What rank 0 alone reads, the drafts that a grammar's
masks are made of, is what the others hold, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.passes.ops.collectives import running_in
from piecegraph.runner.distributed.watched_output import WatchedOutput
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.speculative.speculative_runner import SpeculativeRunner
from piecegraph.runner.tensor_parallel.process_group import RankGroup

if TYPE_CHECKING:
    from piecegraph.runner.distributed.executor import MpExecutor
    from piecegraph.runner.distributed.external_launcher import ExternalLauncherExecutor
    from piecegraph.runner.output.async_output import AsyncOutput
    from piecegraph.runner.sampling.options.grammar import GrammarOutput
    from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput


class GroupRunner(ModelRunner):
    """The runner of one rank, whose collectives run in `group`. All ranks have to get the same calls."""

    group: RankGroup
    """The ranks that run together; closed with the runner."""

    def __init__(self, *, group: RankGroup, **parts: Any) -> None:
        super().__init__(**parts)
        self.group = group
        self._unread: deque[AsyncOutput] = deque()  # of `follow`

    def execute_model(self, output: SchedulerOutput, *, at_most: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
        """Compute the scheduled tokens, as `ModelRunner` does."""
        with running_in(self.group):
            super().execute_model(output, at_most=at_most)

    def follow(self, grammar_output: GrammarOutput | None) -> None:
        """Sample as a rank whose output nobody reads."""
        self._unread.append(self.sample_tokens(grammar_output))
        if len(self._unread) > 1:
            self._unread.popleft().get()  # its memory is reused then

    def reset(self) -> None:
        """Release all rows, and drop outputs."""
        self._unread.clear()
        super().reset()

    def abort(self) -> None:
        """End the collectives in which this rank's GPU waits for a rank that is lost, and free the graphs.

        Nothing can run after it.
        """
        stream = torch.cuda.current_stream(self.group.device)
        self.group.abort(stream.query, super().close, self.take_other_connections())

    def take_other_connections(self) -> Sequence[Callable[[], None]]:
        """Return what closes connections beside `group`, which are no longer this runner's."""
        return ()

    def close(self) -> None:
        """Free the graphs, then the connections to other ranks. Idempotent."""
        super().close()
        self.group.close()


class LeadingRunner(GroupRunner):
    """The runner of rank 0, which sends each call to the other ranks before it runs it itself.

    What is sent is the scheduler's output; every rank samples by itself, with the same logits and seeds, so no token
    travels. A call that does not end normally on rank 0, an interrupt included, leaves ranks out of step, so the other
    ranks are ended then and `WorkerError` is raised by this and all later calls.
    """

    def __init__(self, *, executor: MpExecutor, **parts: Any) -> None:
        super().__init__(**parts)
        self.executor = executor

    def execute_model(self, output: SchedulerOutput, *, at_most: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
        """Compute the scheduled tokens on all ranks."""
        with self.in_step():
            self.executor.send("execute", output, at_most)
            super().execute_model(output, at_most=at_most)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> AsyncOutput:
        """Sample on all ranks, and return what rank 0 drew."""
        with self.in_step():
            self.executor.send("sample", grammar_output)
            output = super().sample_tokens(grammar_output)
        watched: AsyncOutput = self.watched(output)
        return watched

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Run a part of a step on all ranks; if the other ranks are ended, this rank's GPU waits for none of them."""
        try:
            with self.executor.in_step():
                yield
        except BaseException:
            if self.group.is_on_gpu:
                self.abort()
            raise

    def watched(self, output: Any) -> Any:
        """Return an output that notices a lost rank while it is waited for."""
        if not self.group.is_on_gpu:
            return output
        return WatchedOutput(output, self, self.executor.timeout_s)

    def reset(self) -> None:
        """Release all rows of all ranks."""
        if self.executor.is_running:  # else every later call raises anyway
            with self.in_step():
                self.executor.send("reset")
        super().reset()

    def close(self) -> None:
        """Free the graphs, and end the other ranks. Idempotent."""
        super().close()
        self.executor.close()


class LaunchedRunner(GroupRunner):
    """The runner of a rank that a launcher has started: each rank gets the same calls from its own program.

    A call that does not end normally leaves the ranks out of step, so `WorkerError` is raised by all later calls.
    """

    def __init__(self, *, executor: ExternalLauncherExecutor, **parts: Any) -> None:
        super().__init__(**parts)
        self.executor = executor

    def execute_model(self, output: SchedulerOutput, *, at_most: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
        """Compute the scheduled tokens, as all ranks do."""
        with self.executor.in_step():
            super().execute_model(output, at_most=at_most)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> AsyncOutput:
        """Sample, as all ranks do."""
        with self.executor.in_step():
            return super().sample_tokens(grammar_output)


class SpeculativeGroupRunner(GroupRunner, SpeculativeRunner):
    """A `GroupRunner` whose steps verify drafts."""


class LeadingSpeculativeRunner(LeadingRunner, SpeculativeRunner):
    """A `LeadingRunner` whose steps verify drafts."""


class LaunchedSpeculativeRunner(LaunchedRunner, SpeculativeRunner):
    """A `LaunchedRunner` whose steps verify drafts."""
