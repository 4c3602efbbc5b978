"""The body of POST /v1/embeddings: the OpenAI API's fields, and vLLM's further ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import (
    Field,
    StrictInt,
    StrictStr,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from piecegraph.tools.serve.protocol.request_models import Body
from piecegraph.tools.serve.protocol.text_or_tokens import text_or_tokens

MAX_INPUTS = 2048
"""The most texts of one request, as in the OpenAI API."""


class EmbeddingBody(Body):
    """The body of POST /v1/embeddings."""

    ignored: ClassVar[frozenset[str]] = frozenset({"user", "metadata", "safety_identifier"})
    unavailable: ClassVar[Mapping[str, str]] = {
        "messages": "give texts or token ids as input",
        "priority": "texts run in the order in which they come",
        "mm_processor_kwargs": "this version takes text alone",
        "media_io_kwargs": "this version takes text alone",
        "truncation_side": "texts are cut on the tokenizer's own side",
        "padding": "texts of one step need no equal lengths",
        "cache_salt": "a model that pools has no prefix cache",
        "embed_dtype": "vectors are float32",
        "endianness": "base64 is of little-endian numbers",
    }
    without_effect: ClassVar[Mapping[str, tuple[str | float, ...]]] = {
        "priority": (0,),
        "padding": ("do_not_pad",),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }

    input: StrictStr | list[StrictInt] | list[StrictStr] | list[list[StrictInt]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: StrictInt | None = None

    # vLLM's
    add_special_tokens: bool = True
    normalize: bool | None = None
    use_activation: bool | None = None  # the later name of `normalize`
    truncate_prompt_tokens: StrictInt | None = None
    request_id: str | None = Field(default=None, max_length=256)

    @field_validator("input", mode="wrap")
    @classmethod
    def _check_input(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return text_or_tokens("input", value, handler)

    @field_validator("input")
    @classmethod
    def _check_number(cls, value: Any) -> Any:
        if value == []:
            raise ValueError("input is an empty list; give at least one text.")
        if isinstance(value, list) and not isinstance(value[0], int) and len(value) > MAX_INPUTS:
            raise ValueError(f"input has {len(value)} texts; give at most {MAX_INPUTS} in one request.")
        return value

    @model_validator(mode="after")
    def _check_normalize(self) -> EmbeddingBody:
        if self.use_activation is not None:
            if self.normalize not in (None, self.use_activation):
                raise ValueError("use_activation=... and normalize=... are two names of one option; give one of them.")
            self.normalize = self.use_activation
        return self

    @property
    def is_single(self) -> bool:
        """Return whether `input` is one text, rather than a list of them."""
        return isinstance(self.input, str) or isinstance(self.input[0], int)

    def inputs(self) -> list[str | list[int]]:
        """Return the texts, each as a string or token ids."""
        found: Any = [self.input] if self.is_single else self.input
        return list(found)
