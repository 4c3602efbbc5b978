"""`SpeculativeEngine`, an `Engine` whose steps give a request several tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from piecegraph.errors import RequestError
from piecegraph.runner.engine.engine import Engine
from piecegraph.runner.output.async_output import AsyncOutput, ModelRunnerOutput
from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput
from piecegraph.runner.speculative.constrained_drafts import ConstrainedDrafts
from piecegraph.runner.speculative.speculative_runner import SpeculativeRunner
from piecegraph.runner.speculative.speculative_scheduler import REQUEST_KEY, SpeculativeScheduler
from piecegraph.runner.speculative.verified_output import VerifiedOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from piecegraph.runner.common.sampling_params import SamplingParams


class SpeculativeEngine(Engine):
    """An engine whose steps verify drafts; all else is as in `Engine`.

    The tokens of a step after one that ends its request are dropped, with their log probabilities. A step in which a
    request with a grammar verifies drafts is launched after its drafts have come to the host, which computes masks from
    them while the model runs.
    """

    def __init__(
        self,
        *,
        scheduler: SpeculativeScheduler,
        runner: SpeculativeRunner,
        max_drafts: int,
        is_synthetic: bool = False,
        **options: Any,
    ) -> None:
        """Store the parts of the engine; `options` are those of `Engine`."""
        super().__init__(scheduler=scheduler, runner=runner, **options)
        self._speculative_scheduler, self._speculative_runner = scheduler, runner
        tokenizer = options["tokenizer"]
        self._drafted = ConstrainedDrafts(max(options["vocab_size"], 0 if tokenizer is None else len(tokenizer)))
        self._constrained = self._drafted
        self._max_drafts = max_drafts
        self._is_synthetic = is_synthetic

    def check_request(
        self, token_ids: Sequence[int], params: SamplingParams, prompt_embeds: torch.Tensor | None = None
    ) -> None:
        """Raise `RequestError` if such a request can never run here."""
        if self._is_synthetic and params.structured_outputs is not None:
            raise RequestError(
                "structured_outputs ask for answers of a grammar, and with rejection_sample_method='synthetic' drafts "
                "are accepted whatever they are; leave one of the two out."
            )
        super().check_request(token_ids, params, prompt_embeds)
        asked = (params.extra_args or {}).get(REQUEST_KEY, 0)
        if isinstance(asked, bool) or not isinstance(asked, int) or not 0 <= asked <= self._max_drafts:
            raise RequestError(
                f"extra_args[{REQUEST_KEY!r}]={asked!r}; it must be a whole number from 0 (no drafts) to "
                f"{self._max_drafts}, the num_speculative_tokens of speculative_config."
            )

    def _launch(self, output: SchedulerOutput) -> AsyncOutput:
        if not self._constrained.requests:
            self._runner.execute_model(output)
            return self._runner.sample_tokens(None)
        drafts = self._speculative_runner.proposed(self._drafted.drafting(output))  # before the step replaces them
        self._runner.execute_model(output)
        return self._runner.sample_tokens(self._drafted.mask_drafts(output, self._in_flight, drafts))

    def _read(self, done: SchedulerOutput, result: AsyncOutput) -> ModelRunnerOutput:
        found = result.get()
        assert isinstance(found, VerifiedOutput), type(found)
        return self._drafted.cut(done, found) if self._constrained.requests else found

    def _distribute(self, done: SchedulerOutput, found: ModelRunnerOutput, num_before: int) -> None:
        assert isinstance(found, VerifiedOutput), type(found)
        if found.prompt_logprobs:
            self._take_prompt_logprobs(done, found.prompt_logprobs)
        took = self._speculative_scheduler.complete_verification(done, found.verified)
        ended, num_removed = self._processor.take_several(took, found.verified_logprobs)
        self._num_output_tokens = num_before + sum([count for _, count in took]) - num_removed
        for request, finish in ended:
            self._finish(request.request_id, finish)
        if self._constrained.requests:
            self._finish_constrained([request for request, _ in took])

    def _distribute_again(self, done: SchedulerOutput, found: ModelRunnerOutput, num_before: int) -> None:
        assert isinstance(found, VerifiedOutput), type(found)
        if found.prompt_logprobs:
            self._take_prompt_logprobs(done, found.prompt_logprobs)
        num_received = 0
        for item in done.sampled:
            request = self._requests.get(item.request_id)
            if request is None or request.epoch != item.epoch:
                continue
            output, one = request.output_token_ids, found.verified[item.request_id]
            if len(output) == one.first_position - request.num_prompt_tokens:
                output += one.token_ids
            num_received += len(output) - (one.first_position - request.num_prompt_tokens)
            self._processor.notify(item.request_id)
        if self._num_output_tokens == num_before:  # else the tokens were counted, and some requests may have ended
            self._num_output_tokens += num_received
