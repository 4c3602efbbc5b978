"""Which matrix products of the library's `piecegraph::linear` runs, noted while somebody asks.

The library loads a kernel when a product first takes it, some milliseconds each: who knows the products ahead can have
them loaded beside other work (`runner/library_ahead.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch


class Product(NamedTuple):
    """`x @ weight.T`, `[num_rows, size]` and `[num_columns, size]`, and a bias of `num_columns` if it has one."""

    num_rows: int
    size: int
    num_columns: int
    dtype: str  # torch's name for it
    has_bias: bool


_noted: ContextVar[dict[Product, None] | None] = ContextVar("noted_products", default=None)


@contextlib.contextmanager
def noting_products() -> Iterator[dict[Product, None]]:
    """A mapping whose keys are the products of this thread, from here to the end of the block, each once."""
    noted: dict[Product, None] = {}
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def note_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """The library is about to multiply `[..., size]` by `[num_columns, size]`."""
    noted = _noted.get()
    if noted is not None:
        num_columns, size = weight.shape
        dtype = str(x.dtype).removeprefix("torch.")
        noted[Product(x.numel() // size, size, num_columns, dtype, bias is not None)] = None
