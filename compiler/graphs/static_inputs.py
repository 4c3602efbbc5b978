"""The checking and filling of a graph's static inputs before a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.errors import InputMismatch


def fill_static_inputs(descriptor: BatchDescriptor, static: Sequence[Any], given: Sequence[Any]) -> None:
    """Copy each given tensor that is not in place already into its static input, which is mutated.

    Raises `InputMismatch`, before anything is copied, for a wrong number of arguments, or one of
    another shape, dtype or device.
    """
    if len(given) != len(static):
        raise InputMismatch(f"{descriptor} was captured with {len(static)} inputs; replay was given {len(given)}.")
    for position, (target, value) in enumerate(zip(static, given, strict=True)):
        where = f"input {position} of {descriptor}"
        if not isinstance(target, torch.Tensor):
            if value is not target and value != target:
                raise InputMismatch(
                    f"{where} is {value!r}; it was captured as {target!r}, which a graph cannot change."
                )
            continue
        if not isinstance(value, torch.Tensor):
            raise InputMismatch(f"{where} is {type(value).__name__}; it was captured as a tensor.")
        for what, found, wanted in (
            ("shape", tuple(value.shape), tuple(target.shape)),
            ("dtype", value.dtype, target.dtype),
            ("device", value.device, target.device),
        ):
            if found != wanted:
                raise InputMismatch(
                    f"{where} has {what} {found}; the graph was captured for {wanted}. "
                    "Pad or convert it, or replay the descriptor it fits."
                )
    for target, value in zip(static, given, strict=True):
        if isinstance(target, torch.Tensor) and not is_in_place(target, value):
            target.copy_(value, non_blocking=True)


def is_in_place(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether `value` is the static input itself, or a view of exactly its memory."""
    return value is target or (value.data_ptr() == target.data_ptr() and value.stride() == target.stride())
