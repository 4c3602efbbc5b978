"""Static pieces are run once before they serve: Inductor measures configurations at a kernel's first launch.

Left to itself that would happen in the first warm-up of a capture, or in a request. Here it happens
one piece after the other, when every compile process is idle, so that nothing of ours disturbs the
measurements. What was found is kept beside the kernels: a later start measures next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from piecegraph.compiler.piece import UniquePiece
from piecegraph.compiler.plan import Slot
from piecegraph.compiler.static_piece import StaticPiece
from piecegraph.compiler.symbolic_sizes import size_at
from piecegraph.passes.effects import is_pure


def needs_tuning(static: StaticPiece) -> bool:
    """Its kernels are measured when they first run: it computes on a GPU."""
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in static.piece.examples)


def tuning_inputs(static: StaticPiece, slots: Sequence[Slot], bound: Mapping[str, Any]) -> tuple[Any, ...]:
    """Inputs the piece can run on: the model's own tensors where `bound` has them, else zeros.

    `slots` name the piece's inputs. A piece that may write to its inputs gets copies.
    """
    writes = not all(map(is_pure, _operations(static.piece)))
    values: list[Any] = []
    for slot, example in zip(slots, static.piece.examples, strict=True):
        if not isinstance(example, torch.Tensor):
            values.append(size_at(example, static.size))
            continue
        tensor = bound.get(slot.name)
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
            values.append(tensor.detach().clone() if writes else tensor)
        else:
            shape, stride = (
                [size_at(size, static.size) for size in sizes] for sizes in (example.shape, example.stride())
            )
            values.append(torch.empty_strided(shape, stride, dtype=example.dtype, device=example.device).zero_())
    return tuple(values)


def _operations(piece: UniquePiece) -> list[torch.fx.Node]:
    return [node for node in piece.graph_module.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
