"""The kernel in C++ for norm and rotary embedding: bounds against float64, how rows may lie, what is left to torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from piecegraph.runner.attention.interface.rotary import Rotary
from piecegraph.runner.attention.kernels.norm_and_rotate import KERNEL, MAX_KEY_DIM, bind_rotation
from tests.cpp_kernels import needs_cpp_compiler, use_kernel
from tests.runner.attention.rotary_case import NORMS, make_rotary, rotate

pytestmark = needs_cpp_compiler

NAN = float("nan")


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel(KERNEL, monkeypatch)


def rows(num_tokens: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_tokens, heads, dim, generator=torch.Generator().manual_seed(heads)).to(dtype)


def run(query: torch.Tensor, key: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotated query, which is `query`, and key, and a check that nothing else has changed."""
    before = key.clone()
    bound = bind_rotation(query, key, rotary)
    assert bound is not None
    bound.run()
    assert torch.equal(key, before)
    return query, bound.key


def check(query: torch.Tensor, key: torch.Tensor, rotary: Rotary) -> None:
    wanted = rotate(query, rotary, rotary.q_norm_weight), rotate(key, rotary, rotary.k_norm_weight)
    bound = 1e-5 if query.dtype is torch.float32 else 2**-7  # where both round, one step of bfloat16
    for found, expected in zip(run(query, key, rotary), wanted, strict=True):
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found.double(), expected.double(), atol=1e-5, rtol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 32), (6, 2), (MAX_KEY_DIM, MAX_KEY_DIM)])
def test_heads_are_normed_and_rotated(dim: int, rotary_dim: int, norm: str, dtype: torch.dtype) -> None:
    for num_tokens, heads in ((1, (9, 3)), (7, (2, 1))):
        rotary = make_rotary(num_tokens, dim, rotary_dim=rotary_dim, dtype=dtype, **NORMS[norm])
        check(rows(num_tokens, heads[0], dim, dtype), rows(num_tokens, heads[1], dim, dtype), rotary)


def test_many_rows_are_shared_by_threads() -> None:
    check(rows(300, 6, 32), rows(300, 2, 32), make_rotary(300, 32, **NORMS["norm"]))


def test_no_rows_are_none() -> None:
    check(rows(0, 6, 32), rows(0, 2, 32), make_rotary(0, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_heads_may_lie_anywhere(dtype: torch.dtype) -> None:
    """They may be parts of one projection, or have heads before tokens; what lies between them stays."""
    whole = rows(5, 10, 16, dtype)
    rotary, before = make_rotary(5, 16, dtype=dtype), whole.clone()
    check(whole[:, :6], whole[:, 6:8], rotary)
    assert torch.equal(whole[:, 6:], before[:, 6:]) and not torch.equal(whole[:, :6], before[:, :6])
    check(rows(6, 5, 16, dtype).transpose(0, 1), rows(2, 5, 16, dtype).transpose(0, 1), rotary)


@pytest.mark.parametrize("tables", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_tables_and_weights_may_have_the_other_dtype(tables: torch.dtype, weights: torch.dtype) -> None:
    rotary = make_rotary(3, 16, dtype=weights, **NORMS["norm"])
    check(rows(3, 2, 16), rows(3, 1, 16), replace(rotary, cos=rotary.cos.to(tables), sin=rotary.sin.to(tables)))


def test_tables_may_have_more_rows_and_lie_apart() -> None:
    table = torch.randn(9, 32)
    check(rows(4, 2, 16), rows(4, 1, 16), Rotary(cos=table[::2, :16], sin=table[1:, 16:]))


def test_one_weight_may_be_missing() -> None:
    rotary = make_rotary(3, 16, **NORMS["norm"])
    check(rows(3, 2, 16), rows(3, 1, 16), replace(rotary, q_norm_weight=None))
    check(rows(3, 2, 16), rows(3, 1, 16), replace(rotary, k_norm_weight=None))


def test_what_is_no_number_stays_in_its_head() -> None:
    query, key = rows(2, 2, 8), rows(2, 1, 8)
    query[0, 1, 3] = NAN
    rotated, _ = run(query, key, make_rotary(2, 8, norm_eps=1e-5))
    assert rotated[0, 1].isnan().all() and not rotated[0, 0].isnan().any() and not rotated[1].isnan().any()


@pytest.mark.parametrize(
    "changes",
    [
        {"query": rows(3, 2, 16, torch.float64)},
        {"key": rows(3, 1, 16, torch.bfloat16)},
        {"query": rows(3, 2, 32)[..., ::2]},
        {"key": rows(3, 1, 32)[..., ::2]},
        {"query": rows(3, 2, MAX_KEY_DIM + 2), "key": rows(3, 1, MAX_KEY_DIM + 2)},
        {"cos": torch.randn(3, 16, dtype=torch.float64)},
        {"sin": torch.randn(3, 16).to(torch.bfloat16)},
        {"sin": torch.randn(3, 32)[:, ::2]},
        {"q_norm_weight": torch.randn(32)[::2]},
        {"q_norm_weight": torch.randn(16).to(torch.bfloat16)},
        {"q_norm_weight": torch.randn(8)},
        {"k_norm_weight": torch.randn(1, 16)},
        {"key": rows(2, 1, 16)},
        {"key": rows(3, 1, 8)},
        {"query": rows(3, 1, 16).expand(3, 2, 16)},
        {"query": rows(1, 2, 16).expand(3, 2, 16)},
        {"cos": torch.randn(3, 32), "sin": torch.randn(3, 32)},
        {"cos": torch.randn(3, 5), "sin": torch.randn(3, 5)},
        {"sin": torch.randn(3, 8)},
        {"sin": torch.randn(1, 16)},
        {"cos": torch.randn(2, 16)},
        {"cos": torch._neg_view(torch.randn(3, 16))},
    ],
    ids=["float64", "two dtypes", "query apart", "key apart", "wide heads", "float64 tables", "tables of two dtypes",
         "a table apart", "a weight apart", "weights of two dtypes", "a short weight", "a weight of two dims",
         "fewer keys", "narrow keys", "one head for all", "one row for all", "wide tables", "an odd size",
         "a narrow sine", "one sine for all", "few rows of a table", "a table with its sign to come"],
)  # fmt: skip
def test_what_the_kernel_does_not_read_is_left_to_torch(changes: dict[str, Any]) -> None:
    values: dict[str, Any] = {"query": rows(3, 2, 16), "key": rows(3, 1, 16), **changes}
    tables = {name: values.pop(name) for name in list(values) if name not in ("query", "key")}
    rotary = replace(make_rotary(3, 16, **NORMS["norm"]), **tables)
    assert bind_rotation(values["query"], values["key"], rotary) is None


def test_without_the_kernel_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNEL, "call", None)
    assert bind_rotation(rows(3, 2, 16), rows(3, 1, 16), make_rotary(3, 16)) is None
