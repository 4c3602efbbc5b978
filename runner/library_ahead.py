"""The library of matrix products made ready by a thread, while the model is made and its weights are loaded.

Its first product takes the library some 70 ms, and the first that takes a kernel 1 to 4 more, of which a start has
dozens: a product for each weight and each size that is captured. Python is not needed for it, so captures do not wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from piecegraph.passes.library_products import Product
from piecegraph.runner.borrowed_memory import borrowed

logger = logging.getLogger(__name__)

FIRST = Product(num_rows=2048, size=1024, num_columns=2048, dtype="bfloat16", has_bias=False)
"""Where nothing is known of a start: large enough for the kernels that prompts take, 16 MiB in all."""

MOST_OF_MEMORY = 1 / 16
"""Of the device's, that a product may take beside weights that are being loaded."""

ALIGNMENT = 256
"""Bytes, of where a tensor begins: torch's too, and the library chooses by it."""


def multiply(device: torch.device, products: Sequence[Product]) -> None:
    """Each product once on `device`, of numbers that nobody reads.

    Their memory is the driver's and its again behind them: weights that are loaded meanwhile find none of it, as they
    would in torch's allocator. Raises what torch raises, and `CaptureError` where the driver has no such memory.
    """
    most_bytes = int(torch.cuda.get_device_properties(device).total_memory * MOST_OF_MEMORY)
    fitting = [each for each in products if num_bytes([each]) <= most_bytes]
    if fitting:
        with torch.cuda.device(device), borrowed(device, num_bytes(fitting)) as memory:
            multiply_in(memory, fitting)


def num_bytes(products: Sequence[Product]) -> int:
    """That `multiply_in` takes."""
    return sum(_sizes(products))


@torch.no_grad()
def multiply_in(memory: torch.Tensor, products: Sequence[Product]) -> None:
    """`memory`: uint8 `[num_bytes(products)]`, or more; overwritten. Dtypes are said: a default may be another's."""
    memory.zero_()
    rows_bytes, weight_bytes, _ = _sizes(products)
    for each in products:
        dtype = getattr(torch, each.dtype)
        x = _view(memory, dtype, each.num_rows, each.size)
        weight = _view(memory[rows_bytes:], dtype, each.num_columns, each.size)
        out = _view(memory[rows_bytes + weight_bytes :], dtype, each.num_rows, each.num_columns)
        if each.has_bias:
            torch.addmm(weight.view(-1)[: each.num_columns], x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out=out)


def _sizes(products: Sequence[Product]) -> tuple[int, int, int]:
    """Bytes of the largest rows, weight and result."""
    rows = max(each.num_rows * each.size * _itemsize(each) for each in products)
    weight = max(each.num_columns * each.size * _itemsize(each) for each in products)
    out = max(each.num_rows * each.num_columns * _itemsize(each) for each in products)
    return _aligned(rows), _aligned(weight), _aligned(out)


def _itemsize(product: Product) -> int:
    itemsize: int = getattr(torch, product.dtype).itemsize
    return itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _view(memory: torch.Tensor, dtype: torch.dtype, num_rows: int, num_columns: int) -> torch.Tensor:
    return memory[: num_rows * num_columns * dtype.itemsize].view(dtype).view(num_rows, num_columns)


class LibraryAhead:
    """Products in a thread of its own, on a GPU; nothing elsewhere."""

    def __init__(
        self,
        device: torch.device,
        find: Callable[[], Sequence[Product]] = tuple,
        run: Callable[[torch.device, Sequence[Product]], None] = multiply,
    ) -> None:
        """`find`, called in the thread: those that the start will run; without any `FIRST` runs. What is in the way of
        finding them, or running, is logged."""
        self._device = device
        self._find = find
        self._run = run
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._device.type == "cuda":
            self._thread = threading.Thread(target=self._attempt, name="piecegraph library ahead", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until it is done; harmless when repeated."""
        if self._thread is not None:
            self._thread.join()

    def _attempt(self) -> None:
        try:
            self._run(self._device, self._find() or (FIRST,))
        except Exception as error:  # the first step multiplies too, and says what is wrong
            logger.info("the library of matrix products was not made ready: %s", error)
