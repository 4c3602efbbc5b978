"""Checks of a generating call's arguments other than its prompts and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from piecegraph.errors import RequestError, did_you_mean
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.common.vllm_interface import OLDER_METHOD_ARGUMENTS, VLLM_METHODS


def per_request_priority(priority: int | Sequence[int] | None, num_requests: int) -> Sequence[int]:
    """Return a priority for each of `num_requests`: the same for all, or one each; 0 if `priority` is None.

    Raises `RequestError` unless the priorities are integers, one for each request.
    """
    if priority is None:
        return [0] * num_requests
    several = isinstance(priority, Sequence) and not isinstance(priority, str)
    priorities = list(priority) if several else [priority] * num_requests  # type: ignore[arg-type]
    if len(priorities) != num_requests:
        raise RequestError(f"{num_requests} prompts, but {len(priorities)} priorities; give one, or one a prompt.")
    for one in priorities:
        if isinstance(one, bool) or not isinstance(one, int):
            raise RequestError(f"priority={one!r}; it must be a whole number, a lower one going first.")
    return priorities  # type: ignore[return-value]  # each was checked


def check_request_fields(
    *, request_id: object, prompt: object, sampling_params: object, priority: object, cache_salt: object
) -> None:
    """Raise `RequestError` unless every field has its type, and can be hashed and compared in a step."""
    if not isinstance(request_id, str):
        raise RequestError(f"request_id={request_id!r}; it must be a string.")
    if prompt is not None and not isinstance(prompt, str):
        raise RequestError(f"prompt={prompt!r}; it must be the text of the token ids, a string, or None.")
    if not isinstance(sampling_params, SamplingParams):
        raise RequestError(f"sampling_params={sampling_params!r}; they must be SamplingParams.")
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
        raise RequestError(f"priority={priority!r}; it must be a whole number of 64 bits, a lower one going first.")
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt={cache_salt!r}; it must be a string.")
    try:
        cache_salt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"cache_salt={cache_salt!r} cannot be encoded as UTF-8 ({error.reason}); give text without lone surrogates."
        ) from error


def check_unicode(text: str) -> None:
    """Raise `RequestError` if the prompt `text` has a half of a surrogate pair, which UTF-8 cannot encode.

    A byte of a command line that is not UTF-8 becomes such a character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is not valid Unicode: character {error.start} is {text[error.start]!r}, half of a surrogate "
            "pair. Give text in UTF-8."
        ) from error


def refuse_lora(lora_request: object) -> None:
    """Raise `RequestError` unless `lora_request` asks for no adapter: None, or a list of Nones.

    For calls that run without adapters.
    """
    several = (
        lora_request if isinstance(lora_request, Sequence) and not isinstance(lora_request, str) else [lora_request]
    )
    for one in several:
        if one is not None:
            raise RequestError(
                f"lora_request={one!r}; a model that pools takes no LoRA adapter: merge it into the weights."
            )


def refuse_unknown_options(method: str, unknown: Mapping[str, object], **empty: object) -> None:
    """Raise on arguments that `method` does not have.

    Raises `RequestError` for arguments of earlier versions of vLLM and for any of `empty` that is neither None nor
    empty, and `TypeError` otherwise, as Python does.
    """
    for name, value in empty.items():
        if value:
            raise RequestError(f"{name}={value!r} is not available here: this version takes text alone. Leave it out.")
    for name, value in unknown.items():
        if name not in OLDER_METHOD_ARGUMENTS:
            known = did_you_mean(name, VLLM_METHODS[method])
            raise TypeError(f"LLM.{method}() got an unexpected keyword argument {name!r}.{known}")
        if value is not None:
            raise RequestError(f"{method} takes no {name}: {OLDER_METHOD_ARGUMENTS[name]}.")
