"""Model runners of the stages of a pipeline: every stage gets the scheduler's output, and runs its part of the step."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.passes.ops.collectives import CollectiveError, running_in
from piecegraph.runner.distributed.group_runner import GroupRunner, LeadingRunner
from piecegraph.runner.output.async_output import ModelRunnerOutput, PromptLogprobs, TokenLogprobs
from piecegraph.runner.pipeline_parallel.ordered_sends import OrderedSends
from piecegraph.runner.pipeline_parallel.stage_link import StageLink
from piecegraph.runner.pipeline_parallel.stage_step import StageStep
from piecegraph.runner.scheduling.scheduler_output import SampledTokens
from piecegraph.runner.step.without_grad import without_grad

if TYPE_CHECKING:
    from piecegraph.runner.output.async_output import AsyncOutput
    from piecegraph.runner.sampling.options.grammar import GrammarOutput
    from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput


class StageRunner(GroupRunner):
    """The runner of one rank of a stage, whose collectives run among the ranks of the stage.

    `execute_model` receives the hidden states of the preceding stage, runs this stage and sends its own to the next,
    without waiting for it. `sample_tokens` of the last stage sends the tokens to all others; theirs returns what will
    have come when it is read. So each stage may run another batch at the same time.

    On a GPU neither waits for the device, but for tokens of other stages: transfers of hidden states are launched as
    the step itself is, outside of its graphs, from and into buffers at fixed addresses, and the last stage sends its
    tokens from a thread.

    Note [tokens of other stages]: a request takes part in a step only when the first stage has received its last token
    (`PipelineScheduler`), so the last stage has sent it, and a stage that needs it waits for no computation.
    """

    step: StageStep

    def __init__(self, *, link: StageLink, **parts: Any) -> None:
        super().__init__(**parts)
        self._link = link
        device = self.step.buffers.input_ids.device
        self._sends = OrderedSends(device, on_error=link.fail)  # of tokens, by the last stage
        self._executed: deque[SchedulerOutput] = deque()  # by this stage, if it is not the last; not yet sampled
        self._awaited: deque[AwaitedTokens] = deque()  # not yet recorded, in the order of steps

    def execute_model(self, output: SchedulerOutput, *, at_most: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
        """Run this stage of the scheduled tokens."""
        stage = self.step.plan.stage
        self._record_for(output)
        if not stage.is_first:
            self._link.receive_hidden(self.step.hidden_states[: output.num_tokens])
        if stage.is_last:
            super().execute_model(output, at_most=at_most)
            return
        with running_in(self.group):
            hidden_states = self._run_stage(output, at_most)
        self._link.send_hidden(hidden_states, self.step.outgoing)
        self._executed.append(output)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> AsyncOutput | AwaitedTokens:  # type: ignore[override]
        """Return the next tokens of the requests that sample in this step, which the last stage draws."""
        if self.step.plan.stage.is_last:
            drawn = super().sample_tokens(grammar_output)
            self._sends.send(lambda: self._send(drawn.get()), is_ready=drawn.is_there)
            return drawn
        output = self._executed.popleft()
        awaited = AwaitedTokens(output, self._link, self.step, self.group.rank == 0)
        self._awaited.append(awaited)
        return awaited

    def follow(self, grammar_output: GrammarOutput | None) -> None:
        """Sample as a rank whose output nobody reads."""
        self.sample_tokens(grammar_output)

    def update_states(self, output: SchedulerOutput) -> None:
        """Free, assign and extend state rows; tokens on their way to freed rows are not recorded."""
        for request_id in output.removed:
            for awaited in self._awaited:
                awaited.forget(request_id)
        super().update_states(output)

    def reset(self) -> None:
        """Release all rows, once all tokens that are on their way have come; none come from a stage that has ended."""
        while self._awaited:
            with suppress(CollectiveError):  # every later call raises
                self._awaited.popleft().receive()
        self._executed.clear()
        super().reset()

    def take_other_connections(self) -> Sequence[Callable[[], None]]:
        """Return what closes the connections to other stages."""
        return self._link.take_connections()

    def close(self) -> None:
        """Free the connections to other stages, then the graphs and those to other ranks. Idempotent."""
        self._sends.close()
        self._link.close()  # no transfer is in a graph
        super().close()

    @without_grad
    def _run_stage(self, output: SchedulerOutput, at_most: CUDAGraphMode) -> torch.Tensor:
        """Return the hidden states of the scheduled tokens, `[num_tokens, hidden_size]`."""
        self.update_states(output)
        batch = self._batch(output)
        hidden_states = self.run(batch, self.dispatch(batch, at_most), output.scheduled).logits
        return hidden_states[: batch.num_tokens]

    def _record_for(self, output: SchedulerOutput) -> None:
        """Record the tokens of earlier steps, up to the last one of a request of this step.

        Those of more steps back than there are stages have come in any case.
        """
        scheduled = {item.request_id for item in output.scheduled}
        needed = [place for place, awaited in enumerate(self._awaited) if not scheduled.isdisjoint(awaited.request_ids)]
        count = max(needed[-1] + 1 if needed else 0, len(self._awaited) - self.step.plan.stage.num_stages)
        for _ in range(count):
            self._awaited.popleft().get()

    def _send(self, output: ModelRunnerOutput) -> None:
        """Send the tokens of a step to all other stages, and the rest of its output to the first rank of all."""
        tokens = list(output.token_ids.as_dict().values())
        assert not output.errors, "only logits processors end requests so, and with several ranks there are none"
        content = _as_bytes(output.logprobs, output.prompt_logprobs) if self.group.rank == 0 else b""
        self._link.send_tokens(torch.tensor([len(content), *tokens], dtype=torch.int64))
        if content:
            self._link.send_bytes(content)


class AwaitedTokens:
    """The tokens of a step that the last stage has drawn or will draw, with the interface of `AsyncOutput`."""

    def __init__(self, output: SchedulerOutput, link: StageLink, step: StageStep, takes_all: bool) -> None:
        """Begin to receive. `takes_all`: whether log probabilities come to this rank, too."""
        sampled = output.sampled
        self.request_ids: Sequence[str] = tuple(item.request_id for item in sampled)
        self._places = {
            item.request_id: (step.states.row(item.request_id), item.num_computed_tokens + item.num_tokens)
            for item in sampled
        }
        self._link = link
        self._step = step
        self._takes_all = takes_all and step.plan.stage.is_first
        self._expected = link.expect_tokens(1 + len(sampled))
        self._received: ModelRunnerOutput | None = None

    @property
    def is_there(self) -> bool:
        """Return whether `get` would not wait for a step."""
        return self._received is not None or self._expected.is_there

    def forget(self, request_id: str) -> None:
        """Record no token of a request, whose row is no longer its own."""
        self._places.pop(request_id, None)

    def receive(self) -> ModelRunnerOutput:
        """Wait for the tokens, and return them without recording them. May be called again."""
        if self._received is None:
            num_bytes, *tokens = self._expected.get().tolist()
            logprobs: Mapping[str, TokenLogprobs] = {}
            prompt_logprobs: Mapping[str, PromptLogprobs] = {}
            if num_bytes and self._takes_all:
                logprobs, prompt_logprobs = _from_bytes(self._link.receive_bytes(num_bytes))
            self._received = ModelRunnerOutput(
                token_ids=SampledTokens(self.request_ids, tokens),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        return self._received

    def get(self) -> ModelRunnerOutput:
        """Wait for the tokens, return them, and stage them for the states of the stage. May be called again."""
        found = self.receive()
        places, self._places = self._places, {}
        if places:
            tokens = found.token_ids.as_dict()
            self._step.states.record_tokens({place: tokens[name] for name, place in places.items()})
        return found


def _as_bytes(logprobs: Mapping[str, TokenLogprobs], prompt_logprobs: Mapping[str, PromptLogprobs]) -> bytes:
    """Return log probabilities as JSON, whose floats are exact; b"" if there are none."""
    return json.dumps((dict(logprobs), dict(prompt_logprobs))).encode() if logprobs or prompt_logprobs else b""


def _from_bytes(content: bytes) -> tuple[dict[str, TokenLogprobs], dict[str, PromptLogprobs]]:
    """Return what `_as_bytes` was given."""
    logprobs, prompt_logprobs = json.loads(content)
    return (
        {name: TokenLogprobs(*row) for name, row in logprobs.items()},
        {
            name: PromptLogprobs(start, [TokenLogprobs(*row) for row in rows])
            for name, (start, rows) in prompt_logprobs.items()
        },
    )


class LeadingStageRunner(LeadingRunner, StageRunner):
    """The runner of rank 0, which is in the first stage and sends each call to all other ranks."""

    def watched(self, output: Any) -> Any:
        """Return the next tokens, which are waited for when they are read."""
        return super().watched(_InStep(output, self))


class _InStep:
    """Awaited tokens of rank 0; if they do not come, all ranks are ended."""

    def __init__(self, awaited: Any, runner: LeadingStageRunner) -> None:
        self._awaited = awaited
        self._runner = runner

    @property
    def is_there(self) -> bool:
        """Return whether `get` would not wait for a step."""
        return bool(self._awaited.is_there)

    def get(self) -> ModelRunnerOutput:
        """Wait for the tokens. Raises `WorkerError`."""
        with self._runner.in_step():
            found: ModelRunnerOutput = self._awaited.get()
            return found
