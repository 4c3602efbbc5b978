"""The choice of the library that computes the prompts of layers with states on a GPU: a pure function, with reasons."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch


class Rule(enum.Enum):
    """The recurrence of a state; the value is its name in messages."""

    DELTA = "the gated delta rule"
    DELTA_BY_CHANNEL = "the gated delta rule by channel"
    MAMBA2 = "the scan of Mamba-2"
    MAMBA = "the scan of Mamba"


class Library(enum.Enum):
    """A package with kernels for prompts; the value is its name for pip."""

    FLA = "flash-linear-attention"
    MAMBA_SSM = "mamba-ssm"


Installed = Mapping[Library, str | None]
"""Each library with None if it can be imported and called as we call it, else with why not and what to install."""

LIBRARIES: Mapping[Rule, Library | str] = {
    Rule.DELTA: Library.FLA,
    Rule.DELTA_BY_CHANNEL: "flash-linear-attention would wait for the device in each step to count chunks",
    Rule.MAMBA2: Library.MAMBA_SSM,
    Rule.MAMBA: "mamba-ssm begins each of these scans without a state",
}
"""The library that computes a rule, or why none does."""

DTYPES = (torch.bfloat16, torch.float16)
"""The dtypes of activations that the libraries are given: they multiply float32 with fewer bits than torch."""

MAX_KEY_DIM = 256
"""The largest heads of keys that flash-linear-attention computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanKind:
    """The properties of a layer that decide whether a library can compute it."""

    rule: Rule
    dtype: torch.dtype  # of activations
    key_dim: int  # of a head; of a scan: the numbers that a channel keeps


@dataclass(frozen=True, slots=True)
class LibraryChoice:
    """The library that computes the prompts of a kind of layer, or None for torch, and why."""

    library: Library | None
    reason: str  # the end of a sentence about a rule


def choose_library(kind: ScanKind, device_type: str, installed: Installed) -> LibraryChoice:
    """Return what computes the prompts of layers of this kind on a device of that type."""
    library = LIBRARIES[kind.rule]
    if device_type != "cuda":
        reason = f"the device is {device_type}, and the libraries' kernels are for GPUs"
    elif isinstance(library, str):
        reason = library
    elif (missing := installed[library]) is not None:
        reason = f"{library.value} is {missing}"
    elif kind.dtype not in DTYPES:
        reason = f"{library.value} would multiply {kind.dtype} with fewer bits"
    elif library is Library.FLA and kind.key_dim > MAX_KEY_DIM:
        reason = f"{library.value} has heads of up to {MAX_KEY_DIM}, and these have {kind.key_dim}"
    else:
        return LibraryChoice(library, f"by {library.value}")
    return LibraryChoice(None, f"in torch: {reason}")
