"""`PoolingParams`, the options of one pooling request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from piecegraph.errors import RequestError

FIELDS_OF_TASK: Mapping[str, tuple[str, ...]] = {
    "embed": ("dimensions", "normalize"),
    "classify": ("use_activation",),
    "token_embed": ("dimensions", "normalize"),
}
"""The fields that have a meaning for each task, besides `truncate_prompt_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """The options of one pooling request, with vLLM's names. Raises `RequestError` for a bad value."""

    truncate_prompt_tokens: int | None = None
    """The number of tokens that a longer text is truncated to by the tokenizer, on its side of truncation and with its
    special tokens; -1: the largest number that the model takes. None: a longer text is refused."""
    dimensions: int | None = None
    """The number of leading dimensions of an embedding to return, of a Matryoshka model; None: all."""
    normalize: bool | None = None
    """Whether an embedding is scaled to length 1, after it was cut; None: as the model's modules say, else True."""
    use_activation: bool | None = None
    """Whether logits of a classifier are turned into probabilities; None: True."""

    def __post_init__(self) -> None:
        for name, least in (("truncate_prompt_tokens", -1), ("dimensions", 1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise RequestError(f"{name}={value!r}; it must be a whole number, {least} or more, or None.")
        if self.truncate_prompt_tokens == 0:
            raise RequestError("truncate_prompt_tokens=0 leaves nothing of a text; give 1 or more, or -1.")
        for name in ("normalize", "use_activation"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise RequestError(f"{name}={value!r}; it must be True, False or None.")

    def check_task(self, task: str) -> None:
        """Raise `RequestError` for a field that has no meaning for `task`."""
        allowed = ("truncate_prompt_tokens", *FIELDS_OF_TASK[task])
        for field in dataclasses.fields(self):
            if field.name not in allowed and getattr(self, field.name) is not None:
                raise RequestError(
                    f"{field.name}={getattr(self, field.name)!r} has no meaning for {task!r}, which takes "
                    f"{', '.join(allowed)}."
                )
