"""The choice of the attention backend: the one the caller names or the best there is, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import torch

from piecegraph.errors import ConfigError, UnsupportedModel, did_you_mean
from piecegraph.runner.attention.interface.backend import AttentionBackend
from piecegraph.runner.attention.interface.layer import AttentionLayer

BACKENDS = {
    "triton": "piecegraph.runner.attention.triton.backend:TritonBackend",
    "flash_attn": "piecegraph.runner.attention.flash_attn.backend:FlashAttnBackend",
    "sdpa": "piecegraph.runner.attention.sdpa:SdpaBackend",
}
"""The module and class of each backend, by name; imported when needed. A new backend is a file and an entry here."""

AUTO = {"cuda": ("triton", "sdpa"), "cpu": ("sdpa",)}
"""The backends that `auto` tries on a kind of device, best first."""

WHY = {
    ("triton", "cuda"): "reads the paged cache in place, its kernels fit any CUDA graph, and it decodes faster than "
    "flash-attn, which attention_backend='flash_attn' asks for",
    ("sdpa", "cuda"): "the fallback: it copies the keys and values of every step, and cannot be part of a CUDA graph",
    ("sdpa", "cpu"): "a CPU has torch's attention, and a kernel of ours for single tokens",
}
"""The reason for which `auto` chooses a backend on a kind of device."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend that runs, and the reasons for the choice."""

    backend: AttentionBackend
    reasons: tuple[str, ...]  # why not each better one, then why this one

    @property
    def is_fallback(self) -> bool:
        """True if `auto` prefers another backend, which cannot run."""
        return len(self.reasons) > 1


def check_backend_name(name: str) -> None:
    """Raise `ConfigError` unless `name` is a backend or `"auto"`."""
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"attention_backend={name!r} is unknown.{did_you_mean(name, ['auto', *BACKENDS])}")


def load_backend(name: str) -> AttentionBackend:
    """Return the backend called `name`. Raises `ConfigError` for an unknown name."""
    check_backend_name(name)
    module, _, attribute = BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(import_module(module), attribute)()
    return backend


def choose_backend(
    name: str, layers: Sequence[AttentionLayer], device: torch.device, block_size: int, *, is_assumed: bool = False
) -> BackendChoice:
    """Return the backend for these layers: the one named, or for `"auto"` the best that can run them.

    `block_size`: tokens of a block of the cache. `is_assumed`: the machine has no such device, so the backend only
    checks the layers and the block size. Raises `ConfigError` for an unknown name, `UnsupportedModel` if the named
    backend cannot run the layers.
    """
    check_backend_name(name)
    reasons: list[str] = []
    for candidate in AUTO.get(device.type, ("sdpa",)) if name == "auto" else (name,):
        backend = load_backend(candidate)
        reason = (
            backend.layers_unsupported_reason(layers, block_size)
            if is_assumed
            else backend.unsupported_reason(layers, device, block_size)
        )
        if reason is None:
            backend = backend.fitted(layers, device, block_size)
            why = WHY.get((candidate, device.type), "it can run") if name == "auto" else "asked for by name"
            return BackendChoice(backend, (*reasons, "; ".join((f"{candidate}: {why}", *backend.notes))))
        if name != "auto":
            raise UnsupportedModel(f"attention backend {name!r}: {reason} Use attention_backend='auto'.")
        reasons.append(f"not {candidate}: {reason}")
    raise UnsupportedModel(f"no attention backend can run this model on {device}: {'; '.join(reasons)}.")
