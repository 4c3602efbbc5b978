"""The instructions and the maker of this machine's processor, as Linux lists them, and what follows from them.

Only what the processor has decides, and no measurement: the same machine gives the same answer however busy it is.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
"""The file in which Linux lists the flags (x86) or features (ARM) of each processor; proc(5)."""

BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names of instructions that multiply bfloat16 and add up in float32: two of x86, and one of ARM."""

OF_KERNELS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", *sorted(BFLOAT16), "amx_int8", "asimd", "i8mm", "sve")
"""The names that say which matrix kernels a processor can run."""


@functools.cache
def cpu_instructions() -> frozenset[str]:
    """Return the names of the instructions that every processor of this machine has; empty where no file lists them."""
    try:
        return instructions_in(CPUINFO.read_text(errors="replace"))
    except OSError:
        return frozenset()


@functools.cache
def is_intel() -> bool:
    """Return whether this machine's processor is Intel's: MKL's kernels are the fastest there, and slow on others."""
    try:
        return is_intel_in(CPUINFO.read_text(errors="replace"))
    except OSError:
        return False


def is_intel_in(cpuinfo: str) -> bool:
    """Return whether the text of `/proc/cpuinfo` names Intel as the maker of all processors."""
    makers = {
        value.strip()
        for name, _, value in (line.partition(":") for line in cpuinfo.splitlines())
        if name.strip() == "vendor_id"
    }
    return makers == {"GenuineIntel"}


def instructions_in(cpuinfo: str) -> frozenset[str]:
    """Return the names that each of the `flags` or `Features` lines in the text of `/proc/cpuinfo` has."""
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    listed = [frozenset(names.split()) for name, _, names in lines if name.strip() in ("flags", "Features")]
    return frozenset.intersection(*listed) if listed else frozenset()


def has_bfloat16(instructions: Collection[str]) -> bool:
    """Return whether a processor with these instructions multiplies bfloat16 without converting it first."""
    return not BFLOAT16.isdisjoint(instructions)
