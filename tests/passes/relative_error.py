"""A fused op beside what it replaces: both against float64, over seeds, shape by shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

MIN_SEEDS = 8

LIMIT = 1.1
"""A fusion's error is at most this many times that of the unfused code."""

Tensors = Sequence[torch.Tensor]


def quick_and_all(shapes: Sequence[Sequence[int]]) -> list[Any]:
    """Return every seventh of `shapes`, and all of them, which is slow, as parameters of a test."""
    assert len(shapes) >= 100
    return [
        pytest.param(shapes[::7], id="a spread"),
        pytest.param(shapes, id="all", marks=pytest.mark.slow),
    ]


def assert_no_less_exact(
    fused: Callable[..., Tensors],
    unfused: Callable[..., Tensors],
    exact: Callable[..., Tensors],
    make_inputs: Callable[[torch.Size, torch.Generator], Tensors],
    shapes: Iterable[Sequence[int]],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    num_terms: Callable[[Sequence[int]], int] = lambda shape: 1,
    min_numbers: int = 1024,
) -> None:
    """`make_inputs` gives float32 tensors; `fused` and `unfused` take them in `dtype`, `exact` the same in float64.
    Tensors of integers stay as they are. Each result's error is the root of its mean square over all seeds.

    `num_terms`: how many numbers are added up for one of a result of this shape, where that is done by libraries or
    by loops that may each have an order of their own. `min_numbers`: so many of each result are compared at least,
    over more seeds if need be: of few, it is luck whose roundings cancel.
    """
    for shape in shapes:
        smallest = min(each.numel() for each in exact(*_inputs(make_inputs, shape, torch.float64, device, 0)))
        squares = torch.zeros(3, 1, dtype=torch.float64, device=device)
        for seed in range(max(MIN_SEEDS, -(-min_numbers // smallest))):
            inputs = _inputs(make_inputs, shape, dtype, device, seed)
            wanted = exact(*_floats_as(torch.float64, inputs))
            errors = [_differences(function(*inputs), wanted) for function in (fused, unfused)]
            squares = squares + torch.stack([_squares(each) for each in (*errors, wanted)])
        ours, theirs = (squares[:2] / squares[2]).sqrt().tolist()
        floor = _float32_floor(num_terms(shape)) if dtype == torch.float32 else 0.0
        good = all(mine <= max(LIMIT * other, floor) for mine, other in zip(ours, theirs, strict=True))
        assert good, (tuple(shape), dtype, ours, theirs)


def _float32_floor(num_terms: int) -> float:
    """In float32 both are as good as the order they add in: an error is good or bad luck up to a unit of the last
    place, or up to what n random numbers lose that are added one after another: eps / 2 * sqrt(n / 6), relatively."""
    return float(torch.finfo(torch.float32).eps * max(1.0, (num_terms / 24) ** 0.5))


def _inputs(
    make: Callable[[torch.Size, torch.Generator], Tensors],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
    seed: int,
) -> Tensors:
    made = make(torch.Size(shape), torch.Generator().manual_seed(seed))
    return _floats_as(dtype, [each.to(device) for each in made])


def _floats_as(dtype: torch.dtype, tensors: Tensors) -> Tensors:
    return [each.to(dtype) if each.is_floating_point() else each for each in tensors]


def _differences(found: Tensors, wanted: Tensors) -> Tensors:
    return [each.double() - other for each, other in zip(found, wanted, strict=True)]


def _squares(tensors: Tensors) -> torch.Tensor:
    """The sum of each tensor's squares, `[len(tensors)]`."""
    return torch.stack([each.square().sum() for each in tensors])
