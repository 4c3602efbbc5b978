"""Where passes define the ops they put into graphs: `piecegraph::name`, called as `.default`.

Through `torch.library.Library` (a call costs 3-4 us, `custom_op` 23-40). An op runs its Triton kernels on a
GPU and its reference in plain torch anywhere else; `passes/kernels/` has the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("piecegraph", "FRAGMENT")


def define_op(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload:
    """Define `piecegraph::` + `schema` and return its overload, which is what a graph calls.

    `implementation` serves every device; `fake` makes its results out of shapes alone (sizes may be symbols).
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"piecegraph::{name}", fake, lib=_library)
    overload: torch._ops.OpOverload = getattr(torch.ops.piecegraph, name).default
    return overload
