"""Conversion of callers' prompts to token ids or embeddings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from piecegraph.errors import RequestError, did_you_mean
from piecegraph.runner.common.token_ids import as_token_ids
from piecegraph.runner.prompts.request_options import check_unicode

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class _PromptOptions(TypedDict, total=False):
    cache_salt: str | None


class TextPrompt(_PromptOptions, total=False):
    """A prompt of text: `TextPrompt(prompt="...")`."""

    prompt: str


class TokensPrompt(_PromptOptions, total=False):
    """A prompt of token ids, with an optional text: `TokensPrompt(prompt_token_ids=[...])`."""

    prompt_token_ids: Sequence[int]
    prompt: str | None


class EmbedsPrompt(_PromptOptions, total=False):
    """A prompt of embeddings `[num_tokens, hidden_size]`, with an optional text."""

    prompt_embeds: torch.Tensor
    prompt: str | None


Prompt = Any
"""One prompt, in any of vLLM's forms:

- a string;
- token ids: a list or tuple of integers, a one-dimensional numpy array or tensor of integers;
- `{"prompt": text}`, `{"prompt_token_ids": ids}` (to which `prompt`, the text of the ids, may be added), or
  `{"prompt_embeds": tensor}` (`[num_tokens, hidden_size]`, floating point).

A mapping may also have `cache_salt`, a string: prompts with different salts share no cached prefix.
"""

Prompts = Any
"""One `Prompt`, or a sequence of them; a sequence of integers is one prompt of token ids."""

_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt")

_IGNORED_KEYS = frozenset({"prompt_token_offsets"})
"""Keys of vLLM's prompts that do not change the output."""

_UNAVAILABLE_KEYS: Mapping[str, str] = {
    "multi_modal_data": "this version takes text alone",
    "multi_modal_uuids": "this version takes text alone",
    "mm_processor_kwargs": "this version takes text alone",
    "media_io_kwargs": "this version takes text alone",
    "token_type_ids": "no causal language model reads them",
    "encoder_prompt": "this version runs decoders alone; give a single prompt",
    "decoder_prompt": "this version runs decoders alone; give a single prompt",
    "prompt_is_token_ids": "give embeddings for every position: those of a token are a row of the model's embeddings",
}
"""Keys of vLLM's prompts that are refused unless they are None or empty, each with the reason."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the engine takes it."""

    text: str | None
    token_ids: list[int]  # all 0, as many as `embeds` has rows, if there are embeddings
    cache_salt: str = ""
    embeds: torch.Tensor | None = None  # [num_tokens, hidden_size], on the CPU, detached


def prompt_sequence(prompts: Prompts) -> Sequence[Prompt]:
    """Return the prompts of `prompts`, one or several. Raises `RequestError` on any other value."""
    if isinstance(prompts, str | bytes | Mapping) or _is_token_ids(prompts):
        return [prompts]
    if isinstance(prompts, Sequence):
        return prompts
    dimensions = _num_dimensions(prompts)
    if dimensions == 0:
        raise RequestError(f"prompts={prompts!r}, an array without a dimension; {_WANTED}")
    if dimensions is not None:
        return list(prompts)
    if hasattr(prompts, "__iter__"):
        return list(prompts)
    raise RequestError(f"prompts={prompts!r}; {_WANTED}")


def tokenize(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None,
    tokenization_kwargs: Mapping[str, Any] | None = None,
) -> TokenizedPrompt:
    """Convert `prompt` to token ids, with the special tokens that its tokenizer adds. Raises `RequestError`.

    `tokenization_kwargs` are passed to the tokenizer, and may turn special tokens off.
    """
    if isinstance(prompt, str):
        return tokenize_text(prompt, tokenizer, tokenization_kwargs)
    if not isinstance(prompt, Mapping):
        if (isinstance(prompt, Sequence) and not isinstance(prompt, bytes)) or _num_dimensions(prompt) is not None:
            return TokenizedPrompt(text=None, token_ids=as_token_ids("prompt", prompt))
        raise RequestError(f"{_WANTED[:-1]}, not {prompt!r}.")
    _check_keys(prompt)
    salt = prompt.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt={salt!r}; it must be a string.")
    salt = salt or ""
    text, token_ids, embeds = (prompt.get(key) for key in ("prompt", "prompt_token_ids", "prompt_embeds"))
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt={text!r}; it must be a string.")
    if embeds is not None:
        if token_ids is not None:
            raise RequestError("a prompt has prompt_embeds and prompt_token_ids; give one of them.")
        embeds = _checked_embeds(embeds)
        return TokenizedPrompt(
            text=text, token_ids=[0] * len(embeds), cache_salt=_embeds_salt(embeds, salt), embeds=embeds
        )
    if token_ids is not None:
        ids = as_token_ids("prompt_token_ids", token_ids)
        return TokenizedPrompt(text=text, token_ids=ids, cache_salt=salt)
    if text is None:
        raise RequestError(f"{_WANTED[:-1]}, not a mapping with {sorted(map(str, prompt))}.")
    tokenized = tokenize_text(text, tokenizer, tokenization_kwargs)
    return TokenizedPrompt(text=text, token_ids=tokenized.token_ids, cache_salt=salt)


def tokenize_text(
    text: str,
    tokenizer: PreTrainedTokenizerBase | None,
    tokenization_kwargs: Mapping[str, Any] | None = None,
    *,
    add_special_tokens: bool = True,
) -> TokenizedPrompt:
    """Convert `text` to token ids; `tokenization_kwargs` are passed to the tokenizer. Raises `RequestError`."""
    if tokenizer is None:
        raise RequestError(
            "a text prompt needs a tokenizer, and there is none (skip_tokenizer_init); "
            'give {"prompt_token_ids": [...]}.'
        )
    if not text:
        raise RequestError("the prompt is empty; give some text.")
    check_unicode(text)
    options = {"add_special_tokens": add_special_tokens, "verbose": False, **(tokenization_kwargs or {})}
    if "return_tensors" in options:
        raise RequestError("tokenization_kwargs has 'return_tensors'; token ids are lists here. Leave it out.")
    try:
        token_ids = tokenizer(text, **options)["input_ids"]
    except (TypeError, ValueError) as error:
        if not tokenization_kwargs:
            raise
        raise RequestError(f"the tokenizer refused tokenization_kwargs={dict(tokenization_kwargs)}: {error}") from error
    if not all(isinstance(token, int) for token in token_ids):
        raise RequestError(
            f"tokenization_kwargs={dict(tokenization_kwargs or {})}; with these the tokenizer returns something else "
            "than one list of token ids. Leave out return_overflowing_tokens and other return_* arguments."
        )
    return TokenizedPrompt(text=text, token_ids=list(token_ids))


_WANTED = (
    'a prompt is a string, a list of token ids, {"prompt": text}, {"prompt_token_ids": [...]} or '
    '{"prompt_embeds": tensor}.'
)


def _num_dimensions(value: Any) -> int | None:
    """Return the number of dimensions of an array or a tensor; None for anything else."""
    found = getattr(value, "ndim", None)
    return found if isinstance(found, int) and hasattr(value, "tolist") else None


def _is_token_ids(prompts: Any) -> bool:
    """Return True if `prompts` is one prompt of token ids rather than several prompts."""
    dimensions = _num_dimensions(prompts)
    if dimensions is not None:
        return dimensions == 1 and str(getattr(prompts, "dtype", "")) != "object"
    if not isinstance(prompts, Sequence) or not prompts:
        return False
    return all(_is_integer(token) for token in prompts)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) or (hasattr(value, "__index__") and _num_dimensions(value) in (0, None))


def _check_keys(prompt: Mapping[str, Any]) -> None:
    for key, value in prompt.items():
        if key in _KEYS or key in _IGNORED_KEYS:
            continue
        if key not in _UNAVAILABLE_KEYS:
            raise RequestError(f"a prompt takes no {key!r}.{did_you_mean(str(key), _KEYS)}")
        is_empty = value is None or (isinstance(value, Mapping | Sequence) and not value)
        if not is_empty:
            raise RequestError(f"a prompt has {key!r}, which is not available here: {_UNAVAILABLE_KEYS[key]}.")


def _checked_embeds(embeds: Any) -> torch.Tensor:
    """Check `prompt_embeds` `[num_tokens, hidden_size]`, and return a copy on the CPU."""
    import torch

    if not isinstance(embeds, torch.Tensor):
        raise RequestError(f"prompt_embeds is of type {type(embeds).__name__}; it must be a tensor.")
    if embeds.is_nested or embeds.layout is not torch.strided or embeds.is_meta:
        found = "nested" if embeds.is_nested else "on the meta device" if embeds.is_meta else str(embeds.layout)
        raise RequestError(f"prompt_embeds is {found}; it must be a dense tensor with values.")
    if embeds.ndim == 3 and embeds.shape[0] == 1:
        embeds = embeds[0]
    if embeds.ndim != 2 or embeds.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise RequestError(
            f"prompt_embeds is a tensor {list(embeds.shape)} of {embeds.dtype}; it must be "
            "[num_tokens, hidden_size], of float16, bfloat16, float32 or float64."
        )
    checked: torch.Tensor = embeds.detach().to("cpu", copy=True).contiguous()
    return checked


def _embeds_salt(embeds: torch.Tensor, salt: str) -> str:
    """Return a cache salt that prompts share only if all their embeddings are equal: all their token ids are 0."""
    import torch

    digest = hashlib.sha256(f"{embeds.dtype} {tuple(embeds.shape)} {salt}".encode(errors="surrogatepass"))
    digest.update(embeds.view(torch.uint8).numpy().data)
    return f"embeds:{digest.hexdigest()}"
