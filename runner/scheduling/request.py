"""One request on the host: what was asked, and how far it has come."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Protocol

from piecegraph.runner.sampling_params import SamplingParams

NEVER = sys.maxsize
"""A token count no request reaches."""

NOT_ADMITTED = 0
"""The epoch of a request that has never run; admissions count from 1."""


class Settles(Protocol):
    """Keeps what steps have changed of many requests together, until somebody looks at one."""

    def settle(self) -> None:
        """Bring the `settled_*` fields of its requests up to date; costs next to nothing if they are."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """The host's truth of one request. There is one object a request, from its arrival to its end: a
    preempted one is put back in the queue, not copied. Mutable; two requests are equal only if they are one.

    The caller fills the first block of fields. The scheduler owns the rest, except `finish_reason` and
    `stop_reason`, which it stores for the engine that decided them.

    computed <= known + pending <= max_total_tokens: `num_computed_tokens` counts tokens whose keys and
    values some step was asked for, done or not; known tokens are on the host; pending ones were sampled by
    steps in flight, and only the device knows them.

    Note [late counts]: while a request is one of a `SteadyDecode`, steps change nothing here. `output_token_ids`,
    `num_computed_tokens` and `num_tokens_with_pending` bring the fields behind them up to date when they are read,
    so they are always right. Only loops over requests that no `SteadyDecode` keeps use the fields themselves.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int  # of its noise
    max_total_tokens: int  # prompt and output together, at most
    arrival: int  # a later request has a larger one
    priority: int = 0  # a smaller one goes first
    stop_token_ids: frozenset[int] = frozenset()  # all that end it, EOS included: what min_tokens forbids
    bad_words: tuple[tuple[int, ...], ...] = ()  # those of its parameters, as tokens
    cache_salt: str = ""  # requests of unlike salts never share cached blocks

    settled_output_token_ids: list[int] = field(default_factory=list)  # see Note [late counts]
    settled_num_computed_tokens: int = 0
    settled_num_tokens_with_pending: int = 0
    kept_by: Settles | None = field(default=None, repr=False)  # who knows better than these three
    num_cached_tokens: int = 0  # found in the prefix cache when first admitted
    num_preemptions: int = 0
    epoch: int = NOT_ADMITTED  # number of its last admission: tells a step of this stay from one of an earlier
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    # KVCacheManager's, kept here so that a decode step with room looks nothing up.
    num_slots: int = 0  # tokens that its blocks hold
    next_registration: int = NEVER  # computed tokens at which its next block can be registered for its prefix
    block_digests: list[bytes] = field(default_factory=list)  # of its first full blocks, as far as asked for

    def __post_init__(self) -> None:
        self.settled_num_tokens_with_pending = self.num_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Those the host knows."""
        if self.kept_by is not None:
            self.kept_by.settle()
        return self.settled_output_token_ids

    @output_token_ids.setter
    def output_token_ids(self, token_ids: list[int]) -> None:
        assert self.kept_by is None, f"{self.request_id!r} decodes steadily; its steps alone add tokens"
        self.settled_output_token_ids = token_ids

    @property
    def num_computed_tokens(self) -> int:
        """Advanced when a step is scheduled, not when it is done."""
        if self.kept_by is not None:
            self.kept_by.settle()
        return self.settled_num_computed_tokens

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        assert self.kept_by is None, f"{self.request_id!r} decodes steadily; its steps alone advance it"
        self.settled_num_computed_tokens = count

    @property
    def num_tokens_with_pending(self) -> int:
        """Known and pending; unchanged when a pending token becomes known."""
        if self.kept_by is not None:
            self.kept_by.settle()
        return self.settled_num_tokens_with_pending

    @num_tokens_with_pending.setter
    def num_tokens_with_pending(self, count: int) -> None:
        assert self.kept_by is None, f"{self.request_id!r} decodes steadily; its steps alone advance it"
        self.settled_num_tokens_with_pending = count

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that steps in flight sample for it."""
        return self.num_tokens_with_pending - self.num_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return getattr(self.sampling_params, "prompt_logprobs", None) is not None

    def token_ids(self, start: int, end: int) -> list[int]:
        """A copy of known tokens `start:end` of prompt and output together."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]
