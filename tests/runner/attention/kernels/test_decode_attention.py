"""The kernel in C++ for one query of each request: bounds against float64, what it writes, what it leaves to torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from piecegraph.runner.attention.kernels.decode_attention import KERNEL, MAX_VALUE_DIM, BoundAttention, bind_attention
from tests.cpp_kernels import needs_cpp_compiler, use_kernel

pytestmark = needs_cpp_compiler

INF, NAN = float("inf"), float("nan")
BLOCK = 16


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel(KERNEL, monkeypatch)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Step:
    """A step of one query of each request over a cache of random blocks, and what it is to write."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor | None
    write_slots: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    num_keys: torch.Tensor
    out: torch.Tensor

    def run(self, **changes: Any) -> torch.Tensor:
        changed = replace(self, **changes)
        bound = changed.bound()
        assert bound is not None
        bound.run(changed.write_slots, changed.slots, changed.num_keys)
        return changed.out

    def bound(self) -> BoundAttention | None:
        return bind_attention(self.query, self.key, self.value, self.keys, self.values, self.out, 0.3)

    def wanted(self) -> torch.Tensor:
        """The attention in float64, after the rows are in the cache."""
        keys, values = self.keys.flatten(0, 1).double(), self.values.flatten(0, 1).double()
        keys[self.write_slots] = self.key.double()
        if self.value is not None:
            values[self.write_slots] = self.value.double()
        else:
            values = keys[..., : self.out.shape[2]]
        found = []
        for request, count in enumerate(self.num_keys.tolist()):
            where = self.slots[request, :count]
            group = self.query.shape[1] // keys.shape[1]
            of_query = keys[where].repeat_interleave(group, 1), values[where].repeat_interleave(group, 1)
            scores = torch.einsum("hd,khd->hk", self.query[request].double(), of_query[0]) * 0.3
            found.append(torch.einsum("hk,khd->hd", scores.softmax(-1), of_query[1]))
        return torch.stack(found)


def step(
    lens: list[int],
    *,
    heads: tuple[int, int] = (6, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    is_latent: bool = False,
) -> Step:
    torch.manual_seed(sum(lens) + heads[0] + dims[0])
    num_blocks = 2 + sum(-(-n // BLOCK) for n in lens)
    free = iter(torch.randperm(num_blocks).tolist())
    slots = torch.zeros(len(lens), max(lens), dtype=torch.int64)
    for request, count in enumerate(lens):
        blocks = torch.tensor([next(free) for _ in range(-(-count // BLOCK))])
        slots[request, :count] = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:count]
    keys = torch.randn(num_blocks, BLOCK, heads[1], dims[0]).to(dtype)
    num_keys = torch.tensor(lens, dtype=torch.int32)
    return Step(
        query=torch.randn(len(lens), heads[0], dims[0]).to(dtype),
        key=torch.randn(len(lens), heads[1], dims[0]).to(dtype),
        value=None if is_latent else torch.randn(len(lens), heads[1], dims[1]).to(dtype),
        write_slots=slots.gather(1, num_keys.long()[:, None] - 1).squeeze(1),
        keys=keys,
        values=keys if is_latent else torch.randn(num_blocks, BLOCK, heads[1], dims[1]).to(dtype),
        slots=slots,
        num_keys=num_keys,
        out=torch.full((len(lens), heads[0], dims[1]), NAN, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", [[1], [2, 64, 65], [129, 1, 300, 63], [2000]])
def test_it_is_attention(lens: list[int], dtype: torch.dtype) -> None:
    for heads, dims in (((6, 2), (16, 16)), ((3, 3), (80, 24)), ((4, 1), (5, 7)), ((8, 2), (128, 256))):
        made = step(lens, heads=heads, dims=dims, dtype=dtype)
        wanted, bound = made.wanted(), 1e-5 if dtype is torch.float32 else 2**-7
        torch.testing.assert_close(made.run().double(), wanted, atol=bound, rtol=bound)
        cached = made.keys.flatten(0, 1)[made.write_slots], made.values.flatten(0, 1)[made.write_slots]
        assert torch.equal(cached[0], made.key) and made.value is not None and torch.equal(cached[1], made.value)


@pytest.mark.parametrize("narrower", ["-mno-avx512f", "-mno-avx"])
def test_vectors_may_be_narrower(narrower: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel(KERNEL, monkeypatch, narrower)
    for heads, dims, dtype in (((10, 2), (72, 40), torch.float32), ((7, 1), (128, 256), torch.bfloat16)):
        made = step([70, 3, 200], heads=heads, dims=dims, dtype=dtype)
        wanted, bound = made.wanted(), 1e-5 if dtype is torch.float32 else 2**-7
        torch.testing.assert_close(made.run().double(), wanted, atol=bound, rtol=bound)


def test_queries_may_be_part_of_a_projection() -> None:
    made = step([5, 70, 3], heads=(6, 2))
    whole = torch.randn(3, 8, 16)
    apart = replace(made, query=whole[:, :6], key=whole[:, 6:])
    torch.testing.assert_close(apart.run().double(), apart.wanted(), atol=1e-5, rtol=1e-5)


def test_values_may_be_part_of_keys() -> None:
    made = step([5, 70], heads=(4, 1), dims=(24, 16), is_latent=True)
    wanted = made.wanted()
    torch.testing.assert_close(made.run().double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(made.keys.flatten(0, 1)[made.write_slots], made.key)


def test_nothing_but_the_slots_of_the_step_is_written() -> None:
    made = step([3, 40])
    before = made.keys.clone(), made.values.clone()
    made.run()
    for was, now in zip(before, (made.keys, made.values), strict=True):
        changed = (was != now).flatten(2).any(-1).flatten().nonzero().flatten()
        assert set(changed.tolist()) == set(made.write_slots.tolist())


def test_a_request_has_the_same_bits_in_every_batch_and_with_any_number_of_threads(threads: None) -> None:
    made = step([200, 1, 65, 900, 64, 129])
    together = made.run().clone()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(made.run(), together)
    for at in range(6):
        alone = {name: getattr(made, name)[at : at + 1] for name in ("query", "key", "value", "write_slots", "out")}
        found = made.run(**alone, slots=made.slots[at : at + 1], num_keys=made.num_keys[at : at + 1])
        assert torch.equal(found[0], together[at])


def test_rows_may_lie_in_a_joint_projection() -> None:
    made = step([30, 70])
    joint = torch.randn(2, 10 * 16)
    key, value = joint[:, 32:64].view(2, 2, 16), joint[:, 64:96].view(2, 2, 16)
    wanted = replace(made, key=key, value=value).wanted()
    torch.testing.assert_close(made.run(key=key, value=value).double(), wanted, atol=1e-5, rtol=1e-5)


def test_values_that_are_no_numbers_reach_the_result() -> None:
    """A NaN of a query or key is one of all its results; an infinite score is NaN, as in torch."""
    made = step([100, 40], dtype=torch.bfloat16)
    query = made.query.clone()
    query[0, 1, 3] = NAN
    found = made.run(query=query)
    assert found[0, 1].isnan().all() and not found[0, 0].isnan().any() and not found[1].isnan().any()
    keys = made.keys.clone()
    keys.flatten(0, 1)[made.slots[1, 20], 1, 0] = INF
    found = made.run(keys=keys)
    assert not found[0].isnan().any() and not found[1, :3].isnan().any()
    wanted = replace(made, keys=keys).wanted()
    assert torch.equal(found[1, 3:].isnan(), wanted[1, 3:].isnan())


def test_a_part_whose_scores_are_all_minus_infinity_has_no_weight() -> None:
    made = step([200], heads=(1, 1))
    query, keys = torch.ones_like(made.query), made.keys.clone()
    keys.flatten(0, 1)[made.slots[0, :60], 0, 0] = -INF
    found, wanted = made.run(query=query, keys=keys), replace(made, query=query, keys=keys).wanted()
    assert not wanted.isnan().any()
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def test_scores_of_any_size_do_not_overflow() -> None:
    made = step([80])
    for factor in (1e-30, 1e4, 1e18):
        large = replace(made, query=made.query * factor)
        wanted = large.wanted()
        torch.testing.assert_close(large.run().double(), wanted, atol=1e-4, rtol=1e-4)


def test_what_it_does_not_take_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made = step([20])
    keys, key = made.keys.clone(), made.key
    others: tuple[dict[str, Any], ...] = (
        {name: getattr(made, name).double() for name in ("query", "key", "value", "keys", "values", "out")},
        {"keys": made.keys.to(torch.float8_e4m3fn)},
        {"keys": torch.zeros(*made.keys.shape[:3], 32)[..., ::2]},
        {"key": torch.zeros(1, 2, 32)[..., ::2]},
        {"value": made.value.bfloat16()},  # type: ignore[union-attr]
        {"out": torch.zeros(1, 6, 2 * 16)[..., ::2]},
        {"out": torch.zeros(1, 6, MAX_VALUE_DIM + 1)},
    )
    for changes in others:
        assert replace(made, **changes).bound() is None
    monkeypatch.setattr(KERNEL, "call", None)
    assert made.bound() is None
    assert torch.equal(made.keys, keys) and key is made.key and made.out.isnan().all()
