"""Graphs' memory from segments that grow, whatever torch's allocator is set to otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from piecegraph.compiler.graphs.cuda_driver import has_virtual_memory
from piecegraph.compiler.torch_compat import allocator_settings

_OPTION = "expandable_segments"


@contextmanager
def growing_segments(device: torch.device) -> Iterator[None]:
    """What torch's allocator asks the GPU for in here, for any thread, becomes part of segments that grow in place
    (`expandable_segments`); afterwards it is set as before.

    Otherwise blocks of up to 1 MiB come from segments of 2 MiB each, and a layer whose memory takes more than one of
    them finds other gaps than the layer ahead of it did, again and again, so that none is a copy of another. Nothing
    happens where the program has them on already, or an allocator other than torch's own, nor on a GPU that cannot map
    memory to addresses.

    Source: torch's notes on CUDA semantics, "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF".
    """
    before = allocator_settings()
    index = device.index if device.index is not None else torch.cuda.current_device()
    if is_on(before) or torch.cuda.get_allocator_backend() != "native" or not has_virtual_memory(index):
        yield
        return
    torch._C._accelerator_setAllocatorSettings(turned(before, on=True))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(turned(before, on=False))


def as_the_program_set_it(settings: str) -> str:
    """`settings` without what `growing_segments` leaves in them."""
    return settings if is_on(settings) else turned(settings, on=False).rpartition(f"{_OPTION}:False")[0].rstrip(",")


def is_on(settings: str) -> bool:
    """Whether `settings` end up with segments that grow."""
    said = [part.partition(":")[2].strip() for part in settings.split(",") if part.partition(":")[0].strip() == _OPTION]
    return bool(said) and said[-1] == "True"


def turned(settings: str, *, on: bool) -> str:
    """`settings`, all of which must be said again or are forgotten, with segments that grow or without."""
    kept = [part for part in settings.split(",") if part.strip() and part.partition(":")[0].strip() != _OPTION]
    return ",".join([*kept, f"{_OPTION}:{on}"])
