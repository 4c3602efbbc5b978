"""Memory that grows under tensors that stay where they are, over a driver that keeps the books."""

from __future__ import annotations

import gc

import pytest
import torch

from piecegraph.errors import OutOfMemory
from piecegraph.runner.device_memory.growing_memory import GrowingMemory
from tests.runner.fake_memory_driver import FakeMemoryDriver

CPU = torch.device("cpu")


def made(driver: FakeMemoryDriver) -> tuple[GrowingMemory, torch.Tensor, torch.Tensor]:
    """Two tensors of 10 blocks, of 48 and of 20 bytes each."""
    memory = GrowingMemory(driver)
    key = memory.empty((10, 2, 3, 4), dtype=torch.float16, device=CPU)
    value = memory.empty((10, 2, 5), dtype=torch.int16, device=CPU)
    return memory, key, value


def test_a_tensor_is_as_torch_would_make_it() -> None:
    memory = GrowingMemory(FakeMemoryDriver(10_000))
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        tensor, expected = memory.empty((10, 2, 3), dtype=dtype, device=CPU), torch.empty(10, 2, 3, dtype=dtype)
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (expected.shape, expected.stride(), dtype)
        assert tensor.storage_offset() == 0 and tensor.is_contiguous()


def test_the_first_block_has_memory() -> None:
    """A range of all blocks is reserved, one piece is mapped, and its handle is not kept."""
    driver = FakeMemoryDriver(10_000)
    memory = GrowingMemory(driver)
    memory.empty((10, 100), dtype=torch.uint8, device=CPU)
    assert driver.calls == [("reserve", 1024), ("create", 128), ("map", 128), ("release", 128), ("set_access", 128)]
    assert (memory.num_blocks, memory.mapped_bytes) == (1, 128)


def test_growing_adds_to_what_is_there() -> None:
    driver = FakeMemoryDriver(10_000)
    memory, key, value = made(driver)
    addresses = key.data_ptr(), value.data_ptr()
    key[0], value[0] = 7, 9
    assert memory.num_blocks == 1  # the second block of key would be half there
    driver.calls.clear()
    memory.grow(4)
    assert driver.calls == [
        *[("create", 128), ("map", 128), ("release", 128), ("set_access", 128)],  # 64 of 192 bytes were there
        *[("create", 64), ("map", 64), ("release", 64), ("set_access", 64)],  # 64 of 80
    ]
    assert (memory.num_blocks, memory.mapped_bytes, driver.used_bytes) == (4, 320, 320)
    assert (key.data_ptr(), value.data_ptr()) == addresses
    assert key[0].unique().tolist() == [7] and value[0].unique().tolist() == [9]
    key[3], value[3] = 1, 2
    memory.grow(10)
    assert (memory.num_blocks, driver.used_bytes) == (10, 512 + 256)
    assert driver.accessible == set(driver.mapped)


def test_growing_to_what_is_there_already_asks_for_nothing() -> None:
    driver = FakeMemoryDriver(10_000)
    memory, _key, _value = made(driver)
    memory.grow(5)
    driver.calls.clear()
    memory.grow(5)
    memory.grow(2)
    assert not driver.calls and memory.num_blocks == 5


def test_growing_beyond_the_reserved_addresses_is_refused() -> None:
    memory, _key, _value = made(FakeMemoryDriver(10_000))
    with pytest.raises(AssertionError, match="11 blocks, but addresses are reserved for 10"):
        memory.grow(11)


@pytest.mark.parametrize("num_bytes", [0, 127, 128, 191, 192, 255, 256, 320, 767, 768, 10_000])
def test_blocks_within_some_bytes(num_bytes: int) -> None:
    """The most whose memory, each tensor's rounded up by itself, is not more than that."""
    memory, _key, _value = made(FakeMemoryDriver(10_000))
    blocks = memory.blocks_within(num_bytes)
    takes = [-(-48 * n // 64) * 64 + -(-20 * n // 64) * 64 for n in range(11)]
    assert blocks == max(n for n in range(11) if n == 0 or takes[n] <= num_bytes)
    if blocks:
        memory.grow(blocks)
        assert memory.mapped_bytes == memory.bytes_for(blocks) == takes[blocks]


def test_too_little_memory_changes_nothing() -> None:
    """The memory of the first tensor is freed if there is none for the second."""
    driver = FakeMemoryDriver(64 + 64 + 128 + 63)
    memory, key, _value = made(driver)
    key[0] = 3
    driver.calls.clear()
    message = (
        r"asked for 0\.0 MiB more in 2 tensors, on top of 0\.0 MiB, and the GPU ran out after 0\.0 MiB.*"
        r"lower gpu_memory_utilization, or give num_kv_blocks"
    )
    with pytest.raises(OutOfMemory, match=message):
        memory.grow(4)
    assert driver.calls == [
        *[("create", 128), ("map", 128), ("release", 128), ("set_access", 128)],
        *[("create", 64), ("unmap", 128)],
    ]
    assert (memory.num_blocks, memory.mapped_bytes, driver.used_bytes) == (1, 128, 128)
    assert not driver.handles and key[0].unique().tolist() == [3]
    memory.grow(2)  # what there is can still be had
    assert memory.num_blocks == 2


def test_the_message_has_the_arithmetic() -> None:
    driver = FakeMemoryDriver(30 * 2**20, granularity=2**20)
    memory = GrowingMemory(driver)
    for _ in range(4):
        memory.empty((10, 2**20), dtype=torch.uint8, device=CPU)
    with pytest.raises(OutOfMemory, match=r"36\.0 MiB more in 4 tensors, on top of 4\.0 MiB, .* after 18\.0 MiB"):
        memory.grow(10)


@pytest.mark.parametrize("call", ["map", "set_access"])
def test_another_failure_changes_nothing_either(call: str) -> None:
    driver = FakeMemoryDriver(10_000)
    memory, _key, _value = made(driver)
    driver.fails_at = (call,)
    with pytest.raises(RuntimeError, match=f"{call} failed"):
        memory.grow(10)
    assert (memory.mapped_bytes, driver.used_bytes, driver.handles) == (128, 128, {})


def test_close_waits_and_frees_everything() -> None:
    driver = FakeMemoryDriver(10_000)
    memory, _key, _value = made(driver)
    memory.grow(10)
    driver.calls.clear()
    memory.close()
    memory.close()
    assert driver.calls[0] == ("synchronize", 0)
    assert sorted(driver.calls[1:]) == [("free", 256), ("free", 512), *sorted(("unmap", n) for n in (64, 64, 192, 448))]
    assert not driver.mapped and not driver.reserved and not driver.used_bytes
    with pytest.raises(AssertionError, match="this memory is closed"):
        memory.grow(1)


def test_the_last_tensor_keeps_the_memory() -> None:
    """Views do, too; nobody has to call close."""
    driver = FakeMemoryDriver(10_000)
    memory, key, value = made(driver)
    view = value[:1]
    del memory, key, value
    gc.collect()
    assert driver.used_bytes == 128
    del view
    gc.collect()
    assert not driver.mapped and not driver.reserved


def test_a_tensor_without_memory_for_one_block() -> None:
    """The range it was to have is given back with all others."""
    driver = FakeMemoryDriver(100)
    memory = GrowingMemory(driver)
    memory.empty((10, 8), dtype=torch.uint8, device=CPU)
    with pytest.raises(OutOfMemory, match="the GPU ran out"):
        memory.empty((10, 8), dtype=torch.uint8, device=CPU)
    memory.close()
    assert not driver.mapped and not driver.reserved and not driver.handles


def test_a_tensor_of_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="has nothing to grow"):
        GrowingMemory(FakeMemoryDriver(100)).empty((0, 8), dtype=torch.uint8, device=CPU)


def test_memory_is_given_back_and_allocated_again_at_the_same_addresses() -> None:
    driver = FakeMemoryDriver(10_000)
    memory, key, value = made(driver)
    memory.grow(4)
    before, used = (key.data_ptr(), value.data_ptr()), driver.used_bytes
    assert memory.unmap() == used == 320 and memory.unmap() == 0
    assert not memory.is_mapped and driver.used_bytes == 0 and not driver.mapped
    memory.map_again()
    memory.map_again()
    assert memory.is_mapped and (memory.num_blocks, driver.used_bytes) == (4, used)
    assert (key.data_ptr(), value.data_ptr()) == before
    key[3], value[3] = 1, 2


def test_without_memory_for_all_of_it_nothing_is_allocated_again() -> None:
    driver = FakeMemoryDriver(10_000)
    memory, *_ = made(driver)
    memory.grow(10)
    memory.unmap()
    driver.capacity = 600  # of 768
    with pytest.raises(OutOfMemory, match="the key/value cache asked for"):
        memory.map_again()
    assert not memory.is_mapped and driver.used_bytes == 0
    driver.capacity = 768
    memory.map_again()
    assert memory.num_blocks == 10
