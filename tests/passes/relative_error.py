"""A fused op beside what it replaces: both against float64, over seeds, shape by shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

SEEDS = range(8)

LIMIT = 1.1
"""A fusion's error is at most this many times that of the unfused code."""

Tensors = Sequence[torch.Tensor]


def assert_no_less_exact(
    fused: Callable[..., Tensors],
    unfused: Callable[..., Tensors],
    exact: Callable[..., Tensors],
    make_inputs: Callable[[torch.Size, torch.Generator], Tensors],
    shapes: Iterable[Sequence[int]],
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """`make_inputs` gives float32 tensors; `fused` and `unfused` take them in `dtype`, `exact` the same in float64."""
    for shape in shapes:
        squares = torch.zeros(2, len(exact(*_inputs(make_inputs, shape, dtype, device, 0))), dtype=torch.float64)
        for seed in SEEDS:
            inputs = _inputs(make_inputs, shape, dtype, device, seed)
            expected = exact(*[each.double() for each in inputs])
            for i, function in enumerate((fused, unfused)):
                for j, (found, wanted) in enumerate(zip(function(*inputs), expected, strict=True)):
                    squares[i, j] += _squared_error(found, wanted)
        ours, theirs = (squares / len(SEEDS)).sqrt().tolist()
        # In float32 both are as good as the order they add in: a unit of the last place is good or bad luck.
        floor = torch.finfo(dtype).eps if dtype == torch.float32 else 0.0
        good = all(mine <= max(LIMIT * other, floor) for mine, other in zip(ours, theirs, strict=True))
        assert good, (tuple(shape), dtype, ours, theirs)


def _inputs(
    make: Callable[[torch.Size, torch.Generator], Tensors],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
    seed: int,
) -> Tensors:
    return [each.to(device, dtype) for each in make(torch.Size(shape), torch.Generator().manual_seed(seed))]


def _squared_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the mean square of what is expected."""
    return float((found.double() - expected).square().mean() / expected.square().mean())
