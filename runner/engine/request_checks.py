"""`RequestChecks`: whether a request can ever run on an engine, and what follows from its parameters there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from piecegraph.errors import RequestError
from piecegraph.runner.common.logits_processor import PROCESSOR_ERRORS, LogitsProcessors
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.common.token_ids import as_token_ids, kept_tokens
from piecegraph.runner.output.prompt_state import describe_error
from piecegraph.runner.sampling.options.bad_word_tokens import bad_words_token_ids
from piecegraph.runner.step.prompt_embeds import check_prompt_embeds
from piecegraph.runner.structured_output.grammars import Grammars

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from piecegraph.runner.structured_output.protocol import StructuredOutputBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestChecks:
    """The limits of an engine that a request is checked against. The requests that run play no part."""

    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: frozenset[int]
    max_model_len: int  # tokens of a prompt and its output together
    vocab_size: int
    embedding_size: int | None  # the row size of prompt embeddings; None: they are refused
    max_logprobs: int  # the most log probabilities that a request may ask for
    logits_processors: LogitsProcessors  # classes, which validate parameters
    grammars: Grammars  # compiles those of `structured_outputs`

    def check(
        self, token_ids: Sequence[int], params: SamplingParams, prompt_embeds: torch.Tensor | None = None
    ) -> None:
        """Raise `RequestError` if a request with this prompt and these parameters can never run."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params={params!r}; it must be SamplingParams.")
        params = params.snapshot()
        if prompt_embeds is not None:
            check_prompt_embeds(prompt_embeds, params, self.embedding_size)
        self._check_params(params)
        self._check_prompt(self.prompt_tokens(token_ids, params))

    def prompt_tokens(self, token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """Return the prompt's tokens, without those that `truncate_prompt_tokens` removes at its start."""
        tokens = as_token_ids("the prompt", token_ids)
        return kept_tokens(tokens, params.truncate_prompt_tokens, self.max_model_len)

    def stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return all tokens that end a completion; EOS tokens are among them unless `ignore_eos` is set."""
        return frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.eos_token_ids)

    def bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of the bad words. Raises `RequestError` if the tokenizer refuses them."""
        if not params.bad_words:
            return ()
        assert self.tokenizer is not None, "checked by `check`"
        try:
            return bad_words_token_ids(self.tokenizer, params.bad_words)
        except (TypeError, ValueError) as error:  # tokenizers raise either
            raise RequestError(f"bad_words={params.bad_words}; the tokenizer refused them: {error}") from error

    def _check_params(self, params: SamplingParams) -> None:
        if self.tokenizer is None:
            for name, value in (("stop strings", params.stop_strings), ("bad_words", params.bad_words)):
                if value:
                    raise RequestError(
                        f"{name} need a tokenizer, and there is none (skip_tokenizer_init); use "
                        f"{'stop_token_ids' if name == 'stop strings' else 'logit_bias'}."
                    )
        params.check_vocabulary(self.vocab_size)
        for name, wanted in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if wanted is not None and (self.vocab_size if wanted == -1 else wanted) > self.max_logprobs:
                raise RequestError(
                    f"{name}={wanted}; it must be at most max_logprobs={self.max_logprobs}. Ask for fewer, or make "
                    "the LLM with a larger max_logprobs."
                )
        self._check_grammar(params)
        for processor in self.logits_processors:
            try:
                processor.validate_params(params)
            except ValueError as error:
                raise RequestError(f"{processor.__name__} refuses the sampling parameters: {error}") from error
            except PROCESSOR_ERRORS as error:
                raise RequestError(
                    f"{processor.__name__} refuses the sampling parameters: {describe_error(error)}"
                ) from error

    def _check_grammar(self, params: SamplingParams) -> None:
        """Compile the grammar of `structured_outputs`, if any, and wait for it. Raises `RequestError` if that fails."""
        if params.structured_outputs is None:
            return
        if self.tokenizer is None:
            raise RequestError(
                "structured_outputs need a tokenizer, and there is none (skip_tokenizer_init); use allowed_token_ids."
            )
        self.grammars.compile(params.structured_outputs).result()

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token.")
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len={self.max_model_len} leaves room for at most "
                f"{self.max_model_len - 1} and one more to generate. Shorten it, or raise max_model_len."
            )
        if min(token_ids) >= 0 and max(token_ids) < self.vocab_size:
            return
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"the prompt has token id {token!r}; ids go from 0 to {self.vocab_size - 1}.")


def make_grammars(
    tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: frozenset[int]
) -> Grammars:
    """Return the grammars of an engine, without any; the library that compiles them is imported by the first one."""
    return Grammars(partial(_grammar_backend, tokenizer, vocab_size, eos_token_ids))


def _grammar_backend(
    tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: frozenset[int]
) -> StructuredOutputBackend:
    """Return a new backend of grammars, for `Grammars`.

    This is a function because a bound method would refer to the engine. The engine would then be part of a reference
    cycle, and its memory would be freed only by a garbage collection.
    """
    from piecegraph.runner.structured_output.llguidance_backend import LLGuidanceBackend

    assert tokenizer is not None, "checked by `RequestChecks.check`"
    return LLGuidanceBackend(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
