"""The check at every call that no argument overlaps in memory with one that the graph writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from piecegraph.compiler.splitting.plan import Plan
from piecegraph.compiler.torch_compat.fake_tensors import FakeTensor
from piecegraph.errors import InputMismatch, UnsupportedModel


class OverlapCheck:
    """A check that the arguments and bound tensors that a plan writes overlap with no other input.

    Compiled pieces assume that their inputs do not overlap, so such a call would compute something else than the
    module.
    """

    def __init__(self, plan: Plan, namespace: Mapping[str, Any]) -> None:
        """Store what is compared. Raises `UnsupportedModel` for bound tensors whose own overlap no trace has seen."""
        written = {slot.name for slot in plan.written}
        self._names = tuple(slot.name for slot in plan.arguments)
        self._written = tuple(number for number, name in enumerate(self._names) if name in written)
        self._bound = tuple(
            (slot.name, namespace[slot.name], slot.name in written)
            for slot in plan.bound
            if isinstance(namespace[slot.name], torch.Tensor)
        )
        self._writes_bound = any(is_written for _, _, is_written in self._bound)
        if self._writes_bound:
            _check_storages(self._bound)

    @property
    def is_needed(self) -> bool:
        """Return whether the plan writes an argument or a bound tensor."""
        return bool(self._written) or self._writes_bound

    def check(self, arguments: Sequence[Any]) -> None:
        """Raise `InputMismatch` if a tensor that is written overlaps with another input."""
        places = [
            (*_span(value), (name, value, number in self._written))
            for number, (name, value) in enumerate(zip(self._names, arguments, strict=True))
            if isinstance(value, torch.Tensor)
        ]
        for number, (start, end, place) in enumerate(places):
            _compare(place, [other for its, its_end, other in places[:number] if its < end and start < its_end])
        for name, value, is_written in self._bound:
            start, end = _span(value)
            near = [other for its, its_end, other in places if its < end and start < its_end]
            if near:
                _compare((name, value, is_written), near)


Place = tuple[str, torch.Tensor, bool]


def _span(value: torch.Tensor) -> tuple[int, int]:
    """Return where the storage of `value` begins and ends. Two storages may overlap: slices of one numpy array do."""
    storage = value.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()


def _check_storages(bound: Sequence[Place]) -> None:
    """Raise `UnsupportedModel` if a bound tensor that is written overlaps with one of another storage.

    Tensors of one storage are known to the trace, which keeps them right. Slices of one numpy array have storages of
    their own.
    """
    real = [place for place in bound if not isinstance(place[1], FakeTensor) and not place[1].is_meta]
    for name, value, _ in (place for place in real if place[2]):
        start, end = _span(value)
        for other, its, _ in real:
            its_start, its_end = _span(its)
            apart = (
                its_end <= start or end <= its_start or its.untyped_storage()._cdata == value.untyped_storage()._cdata
            )
            if not apart and may_overlap(value, its):
                raise UnsupportedModel(
                    f"{name} and {other} lie in the same memory but are no views of one tensor (slices of one numpy "
                    f"array, for instance), and the model changes {name} in place. Make both views of one tensor."
                )


def _compare(place: Place, others: Sequence[Place]) -> None:
    name, value, is_written = place
    for other, its, its_is_written in others:
        if (is_written or its_is_written) and may_overlap(value, its):
            changed, read = (name, other) if is_written else (other, name)
            raise InputMismatch(
                f"{changed} and {read} lie in the same memory, and the model changes {changed} in place; it was "
                f"compiled for inputs that lie apart. Pass a copy of one (.clone()), or call the module itself."
            )


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return False for tensors that are known to share no byte, else True.

    Tensors share no byte if one ends before the other begins, or if they are different columns of rows with the same
    stride.
    """
    if not one.numel() or not other.numel():
        return False
    first, second = (one, other) if one.data_ptr() <= other.data_ptr() else (other, one)
    apart = second.data_ptr() - first.data_ptr()
    if apart >= _extent(first, 0):
        return False
    if first.stride() != second.stride() or first.ndim < 2:
        return True
    row = first.stride(0) * first.element_size()
    column = apart % row if row else 0
    return not (row and _extent(first, 1) <= column and column + _extent(second, 1) <= row)


def _extent(value: torch.Tensor, dim: int) -> int:
    """Return the bytes from the first element to the end of the last, over the dims from `dim` on."""
    sizes, strides = value.shape[dim:], value.stride()[dim:]
    return (1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))) * value.element_size()
