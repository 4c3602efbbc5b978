"""The outputs of pooling, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import torch

Pooled = TypeVar("Pooled")


@dataclass(slots=True, kw_only=True)
class PoolingRequestOutput(Generic[Pooled]):
    """A prompt and what was pooled of it."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = field(default=0, compare=False)  # always 0: a prompt is computed whole
    finished: bool = True


@dataclass(slots=True)
class PoolingOutput:
    """The result of `encode`."""

    data: torch.Tensor  # [size] or, of every token, [num_tokens, size]; float32, on the CPU


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of dimensions."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each class, or its logit without `use_activation`."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts match."""

    score: float


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """An output of `LLM.embed`."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """An output of `LLM.classify`."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """An output of `LLM.score`."""
