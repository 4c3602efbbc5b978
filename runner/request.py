"""One request: what was asked, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from piecegraph.runner.detokenizer import Detokenizer
from piecegraph.runner.sampling_params import SamplingParams


@dataclass(slots=True, kw_only=True)
class Request:
    """The scheduler owns `num_computed_tokens` and `block_ids`, the engine the rest."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int  # of its noise
    max_total_tokens: int  # prompt and output together, at most
    detokenizer: Detokenizer | None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache
    block_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    def token_ids(self, start: int, end: int) -> list[int]:
        """Tokens `start:end` of prompt and output together."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return (self.prompt_token_ids[start:end] + self.output_token_ids)[: end - start]
