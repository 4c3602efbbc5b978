"""The collectives of tensor parallelism: `piecegraph::all_reduce`, `all_gather` and `own_columns`.

Those of experts that several engines share are `gather_tokens` and `scatter_sum`.
`all_reduce_add_rms_norm` and `all_reduce_add_norm_linear` do what follows a sum over the ranks, too.

They are ops inside pieces and take plain local tensors. No rank is in a graph: an op finds its group in a context
variable that whoever runs a step sets (`running_in`), so that all ranks share one compiled piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from piecegraph.passes.ops.library import define_op
from piecegraph.passes.ops.linear import linear
from piecegraph.passes.ops.norm_linear import ADD_NORM_LINEAR, add_norm_linear
from piecegraph.passes.ops.rms_norm import ADD_RMS_NORM, add_rms_norm


class CollectiveError(RuntimeError):
    """A collective did not finish: another rank ended, raised or did not answer in time."""


class Group(Protocol):
    """The ranks that compute one model together, as one of them sees it."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over all ranks, a new tensor of the same bits on every rank."""

    def all_reduce_in_place(self, x: torch.Tensor) -> None:
        """Replace `x`, which is contiguous, by what `all_reduce` returns."""

    def add_up_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return `add_rms_norm(all_reduce(x), residual, weight, eps, offset)`, or None if no kernel does all of it.

        `x` is not changed. Both results are new and contiguous. All ranks have the kernel for a shape and dtype, or
        none has it.
        """

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` of all ranks, joined in the last dim in the order of ranks."""

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of `x` of all engines that share experts, in their order; each has as many."""

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return this engine's rows of the sum of `x` over the engines that share experts."""


_group: ContextVar[Group | None] = ContextVar("_group", default=None)


@contextmanager
def running_in(group: Group) -> Iterator[None]:
    """Let collectives inside the block run in `group`."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


def _current() -> Group:
    group = _group.get()
    assert group is not None, "a collective ran outside of running_in"
    return group


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    return _current().all_reduce(x)


def summed(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of `x` over all ranks, in the memory of `x` if that is contiguous."""
    if not x.is_contiguous():
        return _current().all_reduce(x)
    _current().all_reduce_in_place(x)
    return x


def all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `add_rms_norm(all_reduce(x), residual, weight, eps, offset)`; `x` may be overwritten.

    `x` and `residual` are of one shape and dtype; both results are new and contiguous. The bits are those of the
    separate ops, but a norm may differ in its last one where the group has one kernel for all: it adds squares in
    another order.
    """
    found = _current().add_up_and_norm(x, residual, weight, eps, offset)
    return add_rms_norm(summed(x), residual, weight, eps, offset) if found is None else found


def all_reduce_add_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    offset: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `add_norm_linear(all_reduce(x), residual, ...)`; `x` may be overwritten.

    Both results are new and contiguous. The bits are those of the separate ops where the group has no kernel for a sum
    and the norm behind it; else the norm may differ in its last bit, and the linear by rounding.
    """
    found = _current().add_up_and_norm(x, residual, norm_weight, eps, offset)
    if found is None:
        return add_norm_linear(summed(x), residual, norm_weight, eps, offset, weight, bias, activation)
    normed, total = found
    return linear(normed, weight, bias, activation, is_normed=True), total


def norm_and_linear(x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `add_norm_linear(x, *others)` by the kernels that run where a sum and its norm are one kernel.

    It serves to compile them ahead: `all_reduce_add_norm_linear` waits for other ranks.
    """
    *of_norm, weight, bias, activation = others
    normed, total = add_rms_norm(x, *of_norm)
    return linear(normed, weight, bias, activation, is_normed=True), total


def _all_gather(x: torch.Tensor, num_ranks: int) -> torch.Tensor:
    group = _current()
    assert group.size == num_ranks, f"the model was built for {num_ranks} ranks; this group has {group.size}"
    return group.all_gather(x)


def _own_columns(x: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return this rank's columns of `x`, `num_columns` for each rank; zeros where `x` has fewer."""
    start = _current().rank * num_columns
    own = x[..., min(start, x.shape[-1]) : start + num_columns]
    missing = num_columns - own.shape[-1]
    return torch.nn.functional.pad(own, (0, missing)) if missing else own.clone(memory_format=torch.contiguous_format)


def _gather_tokens(x: torch.Tensor, num_engines: int) -> torch.Tensor:
    return _current().gather_tokens(x)


def _scatter_sum(x: torch.Tensor, num_engines: int) -> torch.Tensor:
    return _current().scatter_sum(x)


ALL_REDUCE = define_op("all_reduce(Tensor x) -> Tensor", _all_reduce, lambda x: x.new_empty(x.shape))

ALL_GATHER = define_op(
    "all_gather(Tensor x, int num_ranks) -> Tensor",
    _all_gather,
    lambda x, num_ranks: x.new_empty((*x.shape[:-1], x.shape[-1] * num_ranks)),
)

OWN_COLUMNS = define_op(
    "own_columns(Tensor x, int num_columns) -> Tensor",
    _own_columns,
    lambda x, num_columns: x.new_empty((*x.shape[:-1], num_columns)),
)

GATHER_TOKENS = define_op(
    "gather_tokens(Tensor x, int num_engines) -> Tensor",
    _gather_tokens,
    lambda x, num_engines: x.new_empty((x.shape[0] * num_engines, *x.shape[1:])),
)

SCATTER_SUM = define_op(
    "scatter_sum(Tensor x, int num_engines) -> Tensor",
    _scatter_sum,
    lambda x, num_engines: x.new_empty((x.shape[0] // num_engines, *x.shape[1:])),
)

ALL_REDUCE_ADD_RMS_NORM = define_op(
    "all_reduce_add_rms_norm(Tensor(a!) x, Tensor residual, Tensor? weight, float eps, float offset) -> "
    "(Tensor, Tensor)",
    all_reduce_add_rms_norm,
    ADD_RMS_NORM,
)

ALL_REDUCE_ADD_NORM_LINEAR = define_op(
    "all_reduce_add_norm_linear(Tensor(a!) x, Tensor residual, Tensor? norm_weight, float eps, float offset, "
    "Tensor weight, Tensor? bias, str activation) -> (Tensor, Tensor)",
    all_reduce_add_norm_linear,
    ADD_NORM_LINEAR,
)
