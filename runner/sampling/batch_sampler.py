"""The sampler: from logits to tokens, greedy and random rows, with any options, in one batch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from piecegraph.errors import RequestError
from piecegraph.runner.common.logits_processor import LogitsProcessor
from piecegraph.runner.common.logprobs_mode import LogprobsMode
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.common.token_record import TokenRecord
from piecegraph.runner.sampling.all_options import make_options, with_processors
from piecegraph.runner.sampling.gumbel_sample import gumbel_sample
from piecegraph.runner.sampling.logprobs import LogprobsTensors, gather_logprobs
from piecegraph.runner.sampling.options.protocol import OptionRequest, SamplerOption, SamplingBatch
from piecegraph.runner.sampling.options.staged_rows import StagedRows, float_word, long_words
from piecegraph.runner.sampling.processor_batch import ProcessorOption, processor_options

NO_FAILURES: Mapping[int, BaseException] = {}


class SamplerOutput(NamedTuple):
    """The drawn tokens, on the device; rows of padding are undefined."""

    token_ids: torch.Tensor  # [num_reqs] int64
    logprobs: LogprobsTensors | None  # None if no request asked for any
    failures: Mapping[int, BaseException] = NO_FAILURES  # errors of logits processors, by state row


class Sampler:
    """The device's state of the running requests' sampling, and the draw.

    A request's state is in one row until it ends, as in `RequestStates`. The host decides what a batch needs, so an
    option that no request of it uses costs nothing. Modelled on the sampler of vLLM's Model Runner V2.
    """

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_model_len: int,
        vocab_size: int,
        device: torch.device | str,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> None:
        device = torch.device(device)
        self._max_num_reqs, self._device = max_num_reqs, device
        self._logprobs_mode = logprobs_mode
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._options = make_options(max_num_reqs=max_num_reqs, vocab_size=vocab_size, device=device)
        self._processor_option: ProcessorOption | None = None  # either of the two
        self._temperature = StagedRows(max_num_reqs, device, width=1)
        self._seeds = StagedRows(max_num_reqs, device, width=2)
        self._num_logprobs: dict[int, int] = {}  # by state row
        self._may_have_staged = False

    def use_logits_processors(self, processors: Sequence[LogitsProcessor]) -> None:
        """Have `processors` process the logits of all requests; no request may have been added yet."""
        before, after = processor_options(processors, max_num_reqs=self._max_num_reqs, device=self._device)
        self._options = with_processors(self._options, before, after)
        self._processor_option = before

    @property
    def temperature(self) -> torch.Tensor:
        """Temperatures `[max_num_reqs]` float32 by state row, 0 for greedy. Their address never changes."""
        return self._temperature.words.view(torch.float32).squeeze(1)

    @property
    def seeds(self) -> torch.Tensor:
        """Seeds `[max_num_reqs]` int64 by state row. Their address never changes, so a graph may hold it."""
        return self._seeds.words.view(torch.int64).squeeze(1)

    def check_request(
        self,
        params: SamplingParams,
        *,
        prompt_len: int,
        stop_token_ids: Collection[int],
        bad_words: Sequence[Sequence[int]],
    ) -> None:
        """Raise `RequestError` if `add_request` could not take such a request: each option must be able to encode its
        part for its table. Changes nothing."""
        request = OptionRequest(
            params=params, prompt_len=prompt_len, stop_token_ids=stop_token_ids, bad_words=bad_words
        )
        for option in self._options:
            try:
                array("i", option.words(request) or ())
            except (ArithmeticError, TypeError, ValueError) as error:
                raise RequestError(f"the sampler cannot take {type(option).__name__} of {params}: {error}") from error

    def add_request(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_len: int,
        stop_token_ids: Collection[int],
        bad_words: Sequence[Sequence[int]],
        token_ids: Sequence[int] = (),
    ) -> None:
        """Add a request at `row`, replacing any that was there. `apply_staged_writes` must follow.

        `stop_token_ids` are all tokens that end its text, EOS tokens included: `min_tokens` forbids them.
        `bad_words` are those of `params`, as tokens. `prompt_len` counts the prompt of the caller, without
        tokens generated before a preemption; `token_ids` has both, for logits processors.
        """
        self.remove_request(row)
        request = OptionRequest(
            params=params,
            prompt_len=prompt_len,
            stop_token_ids=stop_token_ids,
            bad_words=bad_words,
            token_ids=token_ids,
        )
        for option in self._options:
            option.stage(row, request)
        self._temperature.stage(row, [float_word(0.0 if params.is_greedy else params.temperature)])
        self._seeds.stage(row, long_words(seed))
        if params.logprobs is not None:
            self._num_logprobs[row] = self.vocab_size if params.logprobs == -1 else params.logprobs

    def remove_request(self, row: int) -> None:
        """Remove the request at `row`. Idempotent."""
        self._may_have_staged = True
        for option in self._options:
            option.remove(row)
        self._num_logprobs.pop(row, None)

    def apply_staged_writes(self) -> None:
        """Copy staged rows to the device: at most one copy for each option, none if nothing changed."""
        if not self._may_have_staged:
            return
        self._may_have_staged = False
        for option in self._options:
            option.apply_staged_writes()
        self._temperature.apply_staged_writes()
        self._seeds.apply_staged_writes()

    def is_plain(self, rows: Sequence[int]) -> bool:
        """Return True if the requests at these state rows need no more than `gumbel_sample` of unchanged logits."""
        return self.num_logprobs(rows) is None and not any(option.is_used(rows) for option in self._options)

    def num_logprobs(self, rows: Sequence[int]) -> int | None:
        """Return the most log probabilities that a request at these state rows asks for; None if none does."""
        if not self._num_logprobs:
            return None
        return max((self._num_logprobs[row] for row in rows if row in self._num_logprobs), default=None)

    def sample(
        self,
        logits: torch.Tensor,
        *,
        rows: Sequence[int],
        idx_mapping: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        record: TokenRecord | None = None,
    ) -> SamplerOutput:
        """Draw a token for each row of `logits`.

        Args:
            logits: `[num_reqs, vocab_size]`, of any float dtype; not mutated.
            rows: the state row of each row of logits, on the host; -1 is padding.
            idx_mapping: `[num_reqs]` int32, the same on the device.
            positions: `[num_reqs]` int32, the positions of the drawn tokens.
            token_ids: `[max_num_reqs, max_model_len]` int32 by state row: the prompt, then the output, up to
                `positions - 1`.
            record: requests' states, to which the tokens are added (`record_tokens`); mutated.

        The `LogprobsMode` selects the log probabilities. On a GPU the host does not wait, unless there are logits
        processors, which are given the tokens of the step before.
        """
        batch = SamplingBatch(
            rows=rows,
            idx_mapping=idx_mapping.contiguous(),
            positions=positions.contiguous(),
            token_ids=token_ids,
            temperature=self.temperature,
        )
        processed = self.process(logits, batch)
        tokens = gumbel_sample(
            processed,
            idx_mapping=idx_mapping,
            temperature=self.temperature,
            seeds=self.seeds,
            positions=positions,
            record=record,
        )
        failures = NO_FAILURES if self._processor_option is None else self._processor_option.failures
        k = self.num_logprobs(rows)
        if k is None:
            return SamplerOutput(tokens, None, failures)
        mode = self._logprobs_mode
        reported = logits
        if mode.is_processed:
            temperature = self.temperature[idx_mapping.clamp(min=0).long()].unsqueeze(1)
            reported = processed.float() / torch.where(temperature > 0, temperature, 1.0)
        return SamplerOutput(tokens, gather_logprobs(reported, tokens, k, is_normalized=mode.is_normalized), failures)

    def parts(self, logits: torch.Tensor, batch: SamplingBatch) -> tuple[Callable[[], object], ...]:
        """Return the parts of `sample` as functions, each over its own copy of the logits.

        They compile and launch the kernels of `sample` without a useful result, and may run in parallel.
        """

        def apply(option: SamplerOption) -> None:
            option.apply(logits.to(torch.float32, copy=True), option.select(batch), batch)

        def draw() -> None:
            gumbel_sample(
                logits.to(torch.float32, copy=True) if used else logits,
                idx_mapping=batch.idx_mapping,
                temperature=batch.temperature,
                seeds=self.seeds,
                positions=batch.positions,
            )

        def gather(k: int) -> None:
            gather_logprobs(logits, torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device), k)

        used = [option for option in self._options if option.is_used(batch.rows)]
        k = self.num_logprobs(batch.rows)
        return (*(partial(apply, option) for option in used), draw, *([] if k is None else [partial(gather, k)]))

    def process(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Return `logits` after all options but the temperature: `logits` itself if the batch uses none, else a float32
        copy."""
        used = [option for option in self._options if option.is_used(batch.rows)]
        if not used:
            return logits
        processed = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).copy_(logits)
        for option in used:
            option.apply(processed, option.select(batch), batch)
        return processed
