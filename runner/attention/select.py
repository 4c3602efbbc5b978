"""Which attention backend runs: the caller's word, or the best there is, with the reason."""

from __future__ import annotations

from piecegraph.errors import ConfigError, did_you_mean
from piecegraph.runner.attention.backend import AttentionBackend
from piecegraph.runner.attention.sdpa import SdpaBackend

BACKENDS: tuple[type[AttentionBackend], ...] = (SdpaBackend,)
"""A new backend is one file, and one entry here."""

PLANNED = ("triton", "flash_attn")


def select_backend(name: str) -> AttentionBackend:
    """The backend called `name`; `"auto"` is the best available one. Raises `ConfigError` for any other name."""
    available = {backend.name: backend for backend in BACKENDS}
    if name == "auto":
        return BACKENDS[0]()
    if name in PLANNED:
        raise ConfigError(
            f"attention_backend={name!r} is not available in this version; available: auto, {', '.join(available)}."
        )
    if name not in available:
        raise ConfigError(f"attention_backend={name!r} is unknown.{did_you_mean(name, ['auto', *available])}")
    return available[name]()
