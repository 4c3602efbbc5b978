"""The key of a captured graph."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from piecegraph.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDescriptor:
    """The only key a CUDA graph is captured under and looked up by.

    Equal descriptors must be able to share one graph: if a kernel's grid depends on something else,
    that something belongs here, in `extra` if nowhere else (a scalar missing from a graph's key is
    how a replay comes to compute with another batch's value). Raises `ConfigError` for counts that
    no batch can have.
    """

    num_tokens: int  # after padding to a capture size
    num_reqs: int | None = None  # None: any number (PIECEWISE needs no request padding)
    uniform_token_count: int | None = None  # tokens per request when all agree, else None
    num_active_loras: int = 0
    extra: Hashable = ()  # whatever else a foreign kernel's grid depends on

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_reqs", "uniform_token_count"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"BatchDescriptor.{name} is {value}; a batch has at least 1.")
        if self.num_active_loras < 0:
            raise ConfigError(f"BatchDescriptor.num_active_loras is {self.num_active_loras}; it is a count, 0 or more.")

    def __str__(self) -> str:
        parts = [f"num_tokens={self.num_tokens}"]
        parts += [f"num_reqs={self.num_reqs}"] if self.num_reqs is not None else []
        parts += [f"uniform_token_count={self.uniform_token_count}"] if self.uniform_token_count is not None else []
        parts += [f"num_active_loras={self.num_active_loras}"] if self.num_active_loras else []
        parts += [f"extra={self.extra!r}"] if self.extra != () else []
        return f"BatchDescriptor({', '.join(parts)})"
