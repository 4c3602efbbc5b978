"""One request on the host: its parameters, its tokens, and its progress."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from piecegraph.runner.common.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from piecegraph.runner.scheduling.lora_slots import Adapter
    from piecegraph.runner.structured_output.grammars import GrammarState

NEVER = sys.maxsize
"""A token count that no request reaches."""

NOT_ADMITTED = 0
"""The epoch of a request that has never run; admissions count from 1."""


class Settles(Protocol):
    """An owner of many requests that applies the changes of steps to them only when one of them is read."""

    def settle(self) -> None:
        """Bring the `settled_*` fields of the requests up to date; next to free if they are.

        A call after one that an exception has interrupted continues where that one stopped.
        """


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """The authoritative host state of one request, mutable and compared by identity.

    There is one object a request, from its arrival to its end: a preempted request returns to the queue as it is.
    The caller fills the first block of fields. The scheduler owns the rest, except `finish_reason`, `stop_reason` and
    `error`, which it stores for the engine that decided them.

    computed <= known + pending <= max_total_tokens: `num_computed_tokens` counts tokens whose keys and
    values are scheduled for computation, done or not; known tokens are on the host; pending tokens were sampled by
    steps in flight, and only the device knows them. With drafts, the counts of computed and of pending tokens are those
    of steps in flight that reject no draft: upper bounds, which `num_unverified_tokens` less is a lower one.

    Note [late counts]: while a request is part of a `SteadyDecode`, steps do not change the `settled_*` fields.
    `output_token_ids`, `num_computed_tokens` and `num_tokens_with_pending` bring these fields up to date when they are
    read, so they are always right. Only loops over requests that are in no `SteadyDecode` use the fields themselves.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int  # of the noise
    max_total_tokens: int  # the most tokens of prompt and output together
    arrival: int  # a later request has a larger number
    priority: int = 0  # a smaller number runs first
    stop_token_ids: frozenset[int] = frozenset()  # all tokens that end it, EOS included: what min_tokens forbids
    bad_words: tuple[tuple[int, ...], ...] = ()  # those of its parameters, as tokens
    cache_salt: str = ""  # requests with different salts never share cached blocks
    prompt_embeds: torch.Tensor | None = None  # [num_prompt_tokens, size] on the CPU; replaces the prompt's token ids
    lora: Adapter | None = None  # None: the model itself
    grammar: GrammarState | None = field(default=None, repr=False)  # the output's progress; None: any output

    settled_output_token_ids: list[int] = field(default_factory=list)  # see Note [late counts]
    settled_num_computed_tokens: int = 0
    settled_num_tokens_with_pending: int = 0
    batched_by: Settles | None = field(default=None, repr=False)  # the owner of newer values of these three fields
    num_cached_tokens: int = 0  # found in the prefix cache when first admitted
    scheduled_ts: float = 0.0  # monotonic time of its first admission
    num_preemptions: int = 0
    num_admitted_tokens: int = 0  # known when it was last admitted; a token after them comes from a step
    num_unverified_tokens: int = 0  # of the computed ones, drafts that steps in flight may still reject
    num_ready_drafts: int = 0  # drafted for its next step, as far as the host knows
    epoch: int = NOT_ADMITTED  # number of its last admission, by which steps of earlier admissions are recognised
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # what failed, if `finish_reason` is "error"

    # These belong to KVCacheManager and lie here so that a decode step within a block needs no lookup.
    num_slots: int = 0  # tokens that its blocks hold
    next_registration: int = NEVER  # computed tokens at which its next block can be registered for its prefix
    block_digests: list[bytes] = field(default_factory=list)  # of its first full blocks, as far as asked for

    def __post_init__(self) -> None:
        self.settled_num_tokens_with_pending = self.num_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The output tokens that the host knows."""
        if self.batched_by is not None:
            self.batched_by.settle()
        return self.settled_output_token_ids

    @output_token_ids.setter
    def output_token_ids(self, token_ids: list[int]) -> None:
        assert self.batched_by is None, f"{self.request_id!r} decodes steadily; its steps alone add tokens"
        self.settled_output_token_ids = token_ids

    @property
    def num_computed_tokens(self) -> int:
        """The number of computed tokens; a step counts from when it is scheduled, not from when it is done."""
        if self.batched_by is not None:
            self.batched_by.settle()
        return self.settled_num_computed_tokens

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        assert self.batched_by is None, f"{self.request_id!r} decodes steadily; its steps alone advance it"
        self.settled_num_computed_tokens = count

    @property
    def num_tokens_with_pending(self) -> int:
        """The number of known and pending tokens; unchanged when a pending token becomes known."""
        if self.batched_by is not None:
            self.batched_by.settle()
        return self.settled_num_tokens_with_pending

    @num_tokens_with_pending.setter
    def num_tokens_with_pending(self, count: int) -> None:
        assert self.batched_by is None, f"{self.request_id!r} decodes steadily; its steps alone advance it"
        self.settled_num_tokens_with_pending = count

    @property
    def num_prompt_tokens(self) -> int:
        """The number of prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """The number of known tokens, prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """The number of tokens that steps in flight sample for the request."""
        return self.num_tokens_with_pending - self.num_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if log probabilities of the prompt are asked for."""
        return getattr(self.sampling_params, "prompt_logprobs", None) is not None

    @property
    def prefix_salt(self) -> bytes:
        """What the request's cached blocks depend on besides tokens: its salt, and the contents of its adapter."""
        salt = self.cache_salt.encode()
        return salt if self.lora is None else b"\xff" + self.lora.digest + salt  # no UTF-8 text begins with 0xff

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return a copy of known tokens `start:end` of prompt and output together."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]
