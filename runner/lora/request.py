"""`LoRARequest`, which names the adapter that a request runs with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from piecegraph.errors import RequestError

MAX_ID = 2**63 - 1
"""The largest number of an adapter."""


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by name, number and folder; the fields have vLLM's names.

    `lora_int_id` identifies the adapter while it is loaded: the first request with a number loads the folder, later
    ones find it. Raises `RequestError` for an empty name or path, and for a number below 1.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or "\0" in value:
                raise RequestError(f"{name}={value!r}; it must be a string that is not empty.")
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_ID:
            raise RequestError(f"lora_int_id={number!r}; it must be a whole number from 1 to {MAX_ID}.")


def per_prompt_loras(lora_request: object, num_prompts: int) -> list[LoRARequest | None]:
    """Return the adapter of each prompt: the same for all, or one each; None is the model itself.

    Raises `RequestError` for anything but a `LoRARequest`, None, or a sequence of these with one for each prompt.
    """
    several = isinstance(lora_request, Sequence) and not isinstance(lora_request, str | bytes)
    found: list[Any] = [*lora_request] if several else [lora_request] * num_prompts  # type: ignore[misc]  # checked
    for one in found:
        if one is not None and not isinstance(one, LoRARequest):
            raise RequestError(f"lora_request={one!r}; it must be a LoRARequest or None, one or one per prompt.")
    if len(found) != num_prompts:
        raise RequestError(f"{num_prompts} prompts, but {len(found)} lora_requests; give one, or one per prompt.")
    return found
