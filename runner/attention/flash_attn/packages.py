"""The kernels of the flash-attn family that can be imported, found without importing them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path


class Family(enum.Enum):
    """The package a kernel comes from; the value is its name in messages."""

    FA2 = "flash-attn 2"
    FA3 = "flash-attn 3"
    FA4 = "flash-attn 4"
    TRITON = "triton"  # our own kernel, for layers that flash-attn cannot or should not decode


Installed = Mapping[Family, str | None]
"""For every family: None if it is installed, else why it cannot be used and what to install."""

FA2_LAST_OTHER_CALL = (2, 6)
"""The last version whose extension takes other arguments than the ones we pass."""


def installed() -> Installed:
    """Return which families are installed, without importing any."""
    return {
        Family.FA2: _fa2_missing(),
        Family.FA3: _fa3_missing(),
        Family.FA4: _fa4_missing(),
        Family.TRITON: None if find_spec("triton") else "not installed: pip install triton",
    }


def _fa2_missing() -> str | None:
    if find_spec("flash_attn_2_cuda") is None:
        return "not installed: pip install flash-attn, version 2.7 or 2.8, built for this torch"
    try:
        version = metadata.version("flash_attn")
    except metadata.PackageNotFoundError:
        return None  # a bare extension on the path
    major, minor = (int(part) for part in version.split(".")[:2])
    if major != 2 or (major, minor) <= FA2_LAST_OTHER_CALL:
        return f"version {version} is installed; we call 2.7 and 2.8: pip install 'flash-attn>=2.7,<3'"
    return None


def _fa3_missing() -> str | None:
    if find_spec("flash_attn_interface") is None:
        return "not installed: build the folder `hopper` of flash-attention (fa3-fwd of PyPI has no paged K/V)"
    if find_spec("flash_attn_config") is None:  # older builds do not list their features
        return None
    flags = import_module("flash_attn_config").CONFIG["build_flags"]
    for feature, flag in (("paged K/V", "PAGEDKV"), ("ragged batches", "VARLEN")):
        if flags.get(f"FLASHATTENTION_DISABLE_{flag}"):
            return f"built without {feature} (FLASHATTENTION_DISABLE_{flag}); build it with them"
    return None


def _fa4_missing() -> str | None:
    install = "pip install flash-attn-4==4.0.0b36"
    spec = find_spec("flash_attn")
    folders = [Path(folder) / "cute" for folder in (spec.submodule_search_locations or ())] if spec else []
    if not any((folder / "interface.py").is_file() for folder in folders):
        return f"not installed: {install}"
    if not any((folder / "paged_kv.py").is_file() for folder in folders):
        return (
            "the `flash_attn.cute` that is found is the draft inside flash-attn 2, without paged K/V: "
            f"{install}, into the same folder as flash-attn 2"
        )
    if find_spec("cutlass") is None:
        return "the package nvidia-cutlass-dsl, which compiles its kernels, is not installed"
    return None
