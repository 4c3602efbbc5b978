"""A first product beside other work, where there is a GPU; what is wrong with it is the first step's to say."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest
import torch

from piecegraph.passes.library_products import Product
from piecegraph.runner.library_ahead import ALIGNMENT, FIRST, LibraryAhead, multiply, multiply_in, num_bytes

GPU = torch.device("cuda", 0)

LAYER = tuple(Product(rows, 512, 1024, "bfloat16", rows == 64) for rows in (4096, 64, 3))


def test_it_runs_in_a_thread_until_somebody_waits() -> None:
    may_go_on, threads = threading.Event(), []

    def run(device: torch.device, products: Sequence[Product]) -> None:
        assert may_go_on.wait(10)
        threads.append((device, products, threading.current_thread()))

    ahead = LibraryAhead(GPU, lambda: LAYER, run)
    ahead.wait()  # nothing has begun
    ahead.start()
    assert not threads
    may_go_on.set()
    ahead.wait()
    ahead.wait()
    ((device, products, thread),) = threads
    assert device == GPU and products == LAYER and thread is not threading.main_thread()


def test_where_nothing_is_known_one_runs() -> None:
    ran: list[Sequence[Product]] = []
    ahead = LibraryAhead(GPU, run=lambda device, products: ran.append(products))
    ahead.start()
    ahead.wait()
    assert ran == [(FIRST,)]


def test_nothing_runs_where_there_is_no_gpu() -> None:
    def fail() -> Sequence[Product]:
        raise AssertionError("it ran")

    ahead = LibraryAhead(torch.device("cpu"), fail)
    ahead.start()
    ahead.wait()


def test_what_fails_is_left_to_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Sequence[Product]:
        raise RuntimeError("out of luck")

    caplog.set_level(logging.INFO, "piecegraph")
    ahead = LibraryAhead(GPU, fail)
    ahead.start()
    ahead.wait()
    assert "out of luck" in caplog.text


def test_products_are_of_zeros_in_the_memory_that_is_given() -> None:
    """Each as it was noted, whatever torch makes by default meanwhile; no number is written behind what was asked for,
    and views begin where torch's tensors would."""
    products = (*LAYER, Product(5, 17, 33, "float16", False), Product(1, 3, 70000, "float32", False))
    size = num_bytes(products)
    assert size % ALIGNMENT == 0
    memory = torch.full((size + 64,), 7, dtype=torch.uint8)
    torch.set_default_dtype(torch.float64)
    try:
        multiply_in(memory[:size], products)
    finally:
        torch.set_default_dtype(torch.float32)
    assert not memory[:size].any()
    assert (memory[size:] == 7).all()


def test_products_are_as_they_were_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Product] = []

    def see(x: torch.Tensor, weight: torch.Tensor, has_bias: bool, out: torch.Tensor) -> None:
        assert out.shape == (x.shape[0], weight.shape[1]) and out.dtype == x.dtype == weight.dtype
        assert {each.data_ptr() % 16 for each in (x, weight, out)} == {0}
        (num_rows, size), num_columns = x.shape, weight.shape[1]
        seen.append(Product(num_rows, size, num_columns, str(x.dtype).removeprefix("torch."), has_bias))

    monkeypatch.setattr(torch, "mm", lambda x, weight, out: see(x, weight, False, out))
    monkeypatch.setattr(torch, "addmm", lambda bias, x, weight, out: see(x, weight, bias.numel() > 0, out))
    multiply_in(torch.empty(num_bytes(LAYER), dtype=torch.uint8), LAYER)
    assert seen == list(LAYER)


@pytest.mark.gpu
def test_products_run_beside_torchs_allocator_and_leave_nothing() -> None:
    """Whatever the default dtype is meanwhile; in several threads, one after the other; and one that takes too much is
    left out."""
    torch.zeros(1, device=GPU)
    multiply(GPU, (FIRST,))  # the library's workspace
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(GPU), torch.cuda.mem_get_info(GPU)[0]
    torch.set_default_dtype(torch.float16)
    try:
        for _ in range(3):
            ahead = LibraryAhead(GPU, lambda: LAYER)
            ahead.start()
            ahead.wait()
        multiply(GPU, [Product(2**20, 2**16, 2**20, "bfloat16", False)])
    finally:
        torch.set_default_dtype(torch.float32)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(GPU) - before[0] <= 64 * 2**20, "workspaces of other threads"
    assert before[1] - torch.cuda.mem_get_info(GPU)[0] <= 256 * 2**20
