"""From logits to tokens: greedy and random rows, with any options, in one batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import torch

from piecegraph.runner.sampling.gumbel_sample import gumbel_sample
from piecegraph.runner.sampling.logprobs import LogprobsTensors, gather_logprobs
from piecegraph.runner.sampling.options import make_options
from piecegraph.runner.sampling.sampler_option import OptionRequest, SamplerOption, SamplingBatch
from piecegraph.runner.sampling.staged_rows import StagedRows, float_word, long_words
from piecegraph.runner.sampling_params import SamplingParams
from piecegraph.runner.token_record import TokenRecord


class SamplerOutput(NamedTuple):
    """On the device; rows of padding mean nothing."""

    token_ids: torch.Tensor  # [num_reqs] int64
    logprobs: LogprobsTensors | None  # None if nobody asked


class Sampler:
    """What the device knows of the running requests' sampling, and the draw.

    A request's state is in one row until it ends, as in `RequestStates`. What a batch needs is decided on
    the host, so an option nobody in it uses costs nothing. After Model Runner V2's sampler.
    """

    def __init__(self, *, max_num_reqs: int, max_model_len: int, vocab_size: int, device: torch.device | str) -> None:
        device = torch.device(device)
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._options = make_options(max_num_reqs=max_num_reqs, vocab_size=vocab_size, device=device)
        self._temperature = StagedRows(max_num_reqs, device, width=1)
        self._seeds = StagedRows(max_num_reqs, device, width=2)
        self._num_logprobs: dict[int, int] = {}  # by state row
        self._may_have_staged = False

    @property
    def temperature(self) -> torch.Tensor:
        """`[max_num_reqs]` float32 by state row, 0 for greedy. Its address never changes, so a graph may hold it."""
        return self._temperature.words.view(torch.float32).squeeze(1)

    @property
    def seeds(self) -> torch.Tensor:
        """`[max_num_reqs]` int64 by state row. Its address never changes."""
        return self._seeds.words.view(torch.int64).squeeze(1)

    def add_request(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_len: int,
        stop_token_ids: Collection[int],
        bad_words: Sequence[Sequence[int]],
    ) -> None:
        """Take over a request at `row`, in place of any that was there. `apply_staged_writes` must follow.

        `stop_token_ids` are all that end its text, EOS tokens included: `min_tokens` forbids them.
        `bad_words` are those of `params`, as tokens. `prompt_len` counts the prompt of the caller, without
        what was generated before a preemption.
        """
        self.remove_request(row)
        request = OptionRequest(
            params=params, prompt_len=prompt_len, stop_token_ids=stop_token_ids, bad_words=bad_words
        )
        for option in self._options:
            option.stage(row, request)
        self._temperature.stage(row, [float_word(0.0 if params.is_greedy else params.temperature)])
        self._seeds.stage(row, long_words(seed))
        if params.logprobs is not None:
            self._num_logprobs[row] = self.vocab_size if params.logprobs == -1 else params.logprobs

    def remove_request(self, row: int) -> None:
        """The row's request is gone; harmless if there is none."""
        self._may_have_staged = True
        for option in self._options:
            option.remove(row)
        self._num_logprobs.pop(row, None)

    def apply_staged_writes(self) -> None:
        """Bring what was staged to the device: a copy at most for each option, none if nothing changed."""
        if not self._may_have_staged:
            return
        self._may_have_staged = False
        for option in self._options:
            option.apply_staged_writes()
        self._temperature.apply_staged_writes()
        self._seeds.apply_staged_writes()

    def is_plain(self, rows: Sequence[int]) -> bool:
        """Whether the requests at these state rows need no more than `gumbel_sample` of unchanged logits."""
        return self.num_logprobs(rows) is None and not any(option.is_used(rows) for option in self._options)

    def num_logprobs(self, rows: Sequence[int]) -> int | None:
        """The most log probabilities that a request at these state rows asks for; None if none does."""
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
        """Draw a token for each row of `logits` `[num_reqs, vocab_size]`, of any float dtype; they stay unchanged.

        Args:
            rows: the state row of each row of logits, on the host; -1 is padding.
            idx_mapping: `[num_reqs]` int32, the same on the device.
            positions: `[num_reqs]` int32, where the drawn tokens will stand.
            token_ids: `[max_num_reqs, max_model_len]` int32 by state row: the prompt, then the output, up to
                `positions - 1`.
            record: requests' states, to which the tokens are added (`record_tokens`); mutated.

        Log probabilities are those of `logits`, before any option. Waits for nothing on a GPU.
        """
        batch = SamplingBatch(
            rows=rows,
            idx_mapping=idx_mapping.contiguous(),
            positions=positions.contiguous(),
            token_ids=token_ids,
            temperature=self.temperature,
        )
        tokens = gumbel_sample(
            self.process(logits, batch),
            idx_mapping=idx_mapping,
            temperature=self.temperature,
            seeds=self.seeds,
            positions=positions,
            record=record,
        )
        k = self.num_logprobs(rows)
        return SamplerOutput(tokens, None if k is None else gather_logprobs(logits, tokens, k))

    def parts(self, logits: torch.Tensor, batch: SamplingBatch) -> tuple[Callable[[], object], ...]:
        """What `sample` does with these, each part for itself and over logits of its own: for who wants its kernels,
        and no tokens. They may run side by side."""

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
        """`logits` after all options but the temperature: a float32 copy if the batch uses any, else themselves."""
        used = [option for option in self._options if option.is_used(batch.rows)]
        if not used:
            return logits
        processed = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).copy_(logits)
        for option in used:
            option.apply(processed, option.select(batch), batch)
        return processed
