"""Nano-vllm's offline workload: requests of random lengths that all arrive at once.

The same seed gives the same prompts and lengths as its bench.py. This file imports neither torch nor ours, so that
peers can use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

LARGEST_TOKEN_ID = 10_000  # of a prompt, if the vocabulary has it; nano-vllm's


class Lengths(NamedTuple):
    """The numbers of tokens of one request."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A set of requests that all arrive at once."""

    prompts: tuple[list[int], ...]  # token ids
    output_lens: tuple[int, ...]
    shared_prefix: int  # tokens with which every prompt begins

    @property
    def lengths(self) -> tuple[Lengths, ...]:
        return tuple(
            Lengths(len(prompt), output) for prompt, output in zip(self.prompts, self.output_lens, strict=True)
        )


def make_workload(
    num_requests: int,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    *,
    shared_prefix: int = 0,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Return random prompts and output lengths; ranges include both ends. `shared_prefix` is added to each prompt."""
    random = Random(seed)
    largest = min(LARGEST_TOKEN_ID, vocab_size - 1)
    prompts = [[random.randint(0, largest) for _ in range(random.randint(*prompt_tokens))] for _ in range(num_requests)]
    output_lens = tuple(random.randint(*output_tokens) for _ in range(num_requests))
    prefix = [random.randint(0, largest) for _ in range(shared_prefix)]  # last: without one the rest stays the same
    return Workload(
        prompts=tuple([*prefix, *prompt] for prompt in prompts), output_lens=output_lens, shared_prefix=shared_prefix
    )
