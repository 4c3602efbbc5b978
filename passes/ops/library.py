"""The definition of the ops that passes insert: `piecegraph::name`, called as `.default`.

Ops are defined through `torch.library.Library`, whose calls cost 3-4 us (those of `custom_op` cost 23-40). An op runs
its Triton kernels on a GPU and its reference in plain torch on other devices; `passes/kernels/` has the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from piecegraph.passes.ops.op_types import OpOverload

_library = torch.library.Library("piecegraph", "FRAGMENT")

RECORDABLE: dict[OpOverload, Callable[..., Any]] = {}
"""The implementations of the ops that a recorder on a CPU may look into (`is_recordable`), filled at import."""


def define_op(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], *, is_recordable: bool = False
) -> OpOverload:
    """Define the op `piecegraph::` + `schema`, and return its overload, which is what a graph calls.

    `implementation` runs on every device; `fake` makes its results from shapes alone (sizes may be symbols).
    `is_recordable`: `implementation` runs nothing but torch's ops and `CppKernel.run`, on this thread, and decides by
    shapes, strides and dtypes alone, by no number of a tensor.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"piecegraph::{name}", fake, lib=_library)
    overload: OpOverload = getattr(torch.ops.piecegraph, name).default
    if is_recordable:
        RECORDABLE[overload] = implementation
    return overload
