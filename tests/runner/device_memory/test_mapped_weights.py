"""Weights move into memory that can be unmapped, whatever shares their storages, and come back as they were."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.device_memory import mapped_weights as module_of_weights
from piecegraph.runner.device_memory.mapped_weights import MappedWeights
from piecegraph.runner.device_memory.restorable_storages import restorable
from piecegraph.runner.startup.memory.mapped_weights import mapped_weights
from tests.compiler.building.test_bound_weights import DESCRIPTOR, Model, compiled, graphs_of, x
from tests.runner.fake_memory_driver import FakeMemoryDriver


def driver() -> FakeMemoryDriver:
    return FakeMemoryDriver(1 << 30, granularity=4096)


def test_views_of_one_storage_stay_views_of_one() -> None:
    """Objects, values, offsets and strides stay; every storage keeps its size, and an empty one is left alone."""
    base = torch.arange(24.0).reshape(4, 6)
    tied, row, turned = base, base[2], base.t()
    other, empty = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False), torch.empty(0)
    expected = [each.clone() for each in (base, row, turned, other)]
    books = driver()
    weights = MappedWeights(books)
    weights.move([tied, row, turned, other, empty, base])
    for tensor, wanted in zip((base, row, turned, other), expected, strict=True):
        assert torch.equal(tensor, wanted)
        assert any(start <= tensor.data_ptr() < start + size for start, size in books.reserved.items())
    assert row.data_ptr() == base.data_ptr() + 2 * 6 * 4 and turned.stride() == (1, 6)
    assert base.untyped_storage().nbytes() == 96 and other.untyped_storage().nbytes() == 6
    row.fill_(7.0)
    assert base[2].tolist() == turned[:, 2].tolist() == [7.0] * 6
    assert weights.num_bytes == 102 and len(books.reserved) == 1


def test_groups_are_moved_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_weights, "GROUP_BYTES", 1024)
    tensors = [torch.full((100,), float(number)) for number in range(7)]  # 512 bytes each, aligned
    books = driver()
    MappedWeights(books).move(tensors)
    assert len(books.reserved) == 4
    assert [tensor.unique().tolist() for tensor in tensors] == [[float(number)] for number in range(7)]
    assert all(tensor.data_ptr() % 512 == min(books.reserved) % 512 for tensor in tensors)


@pytest.mark.parametrize("is_reloaded", [False, True])
def test_values_are_kept_on_the_host_but_for_those_that_are_read_again(is_reloaded: bool) -> None:
    """An access between the two is a device fault, which the books of this driver only know as memory without use."""
    kept, read_again = torch.ones(8), torch.full((8,), 2.0)
    books = driver()
    weights = MappedWeights(books)
    weights.move([kept, read_again], {read_again.untyped_storage().data_ptr()})
    address, used = kept.data_ptr(), books.used_bytes
    assert weights.release(is_reloaded=False) == used and books.used_bytes == 0
    if is_reloaded:
        assert weights.release(is_reloaded=True) == 0
    for tensor in (kept, read_again):  # the memory is the host's here, so that this stands for its loss
        tensor.fill_(-1.0)
    weights.restore()
    weights.restore()
    assert kept.data_ptr() == address and books.used_bytes == used
    assert kept.tolist() == [1.0] * 8
    assert read_again.tolist() == ([-1.0] if is_reloaded else [2.0]) * 8


def test_graphs_over_moved_weights_read_what_is_restored() -> None:
    """Merged parameters, a weight of two names and a buffer move; nothing is taken for a change of the weights."""
    with torch.no_grad():
        module = Model()
        model = compiled(module)
        before = model(x())
        books = driver()
        weights = mapped_weights(module, model, books)
        for _, tensor in (*model.bound_tensors(), *module.named_parameters(), *module.named_buffers()):
            assert any(start <= tensor.data_ptr() < start + size for start, size in books.reserved.items())
        assert 0 < sum(each.untyped_storage().nbytes() for each in restorable(module)) <= weights.num_bytes
        assert torch.equal(model(x()), before) and model.refresh_weights() == 0
        graphs, _ = graphs_of(model)
        weights.release(is_reloaded=False)
        for parameter in module.parameters():
            parameter.zero_()  # stands for lost memory
        weights.restore()
        assert torch.equal(graphs.replay(DESCRIPTOR), before)
        with pytest.raises(AssertionError, match="captured"):
            mapped_weights(module, model, books)
        graphs.close()
