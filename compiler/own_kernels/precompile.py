"""The compile of kernels of our ops, which overlaps with the compile of pieces in other processes.

Triton compiles a kernel at its first launch: without this, inside the first capture of each kind of bucket.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.common.split_ops import op_name
from piecegraph.compiler.torch_compat.fake_tensors import FakeTensor
from piecegraph.passes.matching.torch_ir import value_of
from piecegraph.passes.ops.collectives import ALL_REDUCE_ADD_NORM_LINEAR, norm_and_linear
from piecegraph.passes.ops.op_types import OpOverload
from piecegraph.passes.ops.quantised.rounded_norms import WITHOUT_SUM

MANY_ROWS = 16384
"""A number of rows for which each gated linear has the library's matmul and an activation of ours behind it. A linear
of few columns has one kernel of ours for thousands of rows: its programs of 64 rows are one wave for longer."""

ROWS = (1, 2, 3, 16, 32, 64, 128, 256, 2048, MANY_ROWS)
"""The numbers of rows with which an op is launched. Each kernel that our ops choose by rows is chosen for one of them.
"""

MAX_BYTES = 256 * 2**20
"""The largest result, in bytes, of a call that is launched."""

MAX_BYTES_OF_MANY_ROWS = 4 * 2**20
"""The largest result, in bytes, of a call with `MANY_ROWS`: 128 columns of 2 bytes, with more than which 2,048 rows are
more than one wave of any GPU we know."""

MAX_WORKERS = 16
"""The number of threads, which mostly wait where child processes compile the kernels."""

Launch = Callable[[Mapping[str, torch.Tensor]], object]
"""Takes tensors of placeholders by name. Other tensors are zeros, with the number of rows as symbolic sizes."""


def precompile_launches(graph: fx.Graph, is_split_op: Callable[[fx.Node], bool]) -> list[Launch]:
    """Return a launch of each of our ops on a GPU, for each kind of its arguments and each number of `ROWS`."""
    launches: dict[object, Launch] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not op_name(node.target).startswith("piecegraph::") or is_split_op(node):
            continue
        if not any(isinstance(value_of(x), torch.Tensor) and value_of(x).is_cuda for x in node.all_input_nodes):
            continue
        op = WITHOUT_SUM.get(node.target, node.target)  # no rank may start a sum alone
        if not isinstance(op, OpOverload) or op._schema.is_mutable:
            continue
        calls = (op, norm_and_linear) if node.target is ALL_REDUCE_ADD_NORM_LINEAR else (op,)
        kind = str(fx.map_arg((node.args, node.kwargs), _kind))
        for call, rows in itertools.product(calls, ROWS):
            if _num_bytes(node, rows) > (MAX_BYTES_OF_MANY_ROWS if rows == MANY_ROWS else MAX_BYTES):
                continue  # for example logits: a library computes so many rows of a large weight
            launches.setdefault((call, kind, rows), partial(_launch, call, node.args, node.kwargs, rows))
    return list(launches.values())


def _num_bytes(node: fx.Node, rows: int) -> int:
    """Return the bytes of a call's first result."""
    value = value_of(node)
    value = value[0] if isinstance(value, list | tuple) else value
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(size if isinstance(size, int) else rows for size in value.shape) * value.element_size()


def _kind(node: fx.Node) -> Any:
    value = value_of(node)
    return (value.dtype, tuple(map(str, value.shape))) if isinstance(value, torch.Tensor) else str(value)


def _launch(op: Any, args: Any, kwargs: Any, rows: int, bound: Mapping[str, torch.Tensor]) -> None:
    def concrete(node: fx.Node) -> Any:
        if node.name in bound:
            return bound[node.name]
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            return rows
        shape = [size if isinstance(size, int) else rows for size in value.shape]
        return torch.zeros(shape, dtype=value.dtype, device=value.device)

    op(*fx.map_arg(args, concrete), **fx.map_arg(kwargs, concrete))


def launch_all(launches: Sequence[Launch], bound: Mapping[str, torch.Tensor]) -> None:
    """Run `launches` in threads, and return when all are done.

    An error of a launch is suppressed: the op fails again, and is reported, where the model calls it. Zeros replace
    fake tensors: a model that is compiled only for the cache has no weights.
    """
    if not launches:
        return
    bound = {name: tensor for name, tensor in bound.items() if not isinstance(tensor, FakeTensor)}
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def attempt(launch: Launch) -> None:
        with contextlib.suppress(Exception), torch.no_grad():
            if device is not None:
                torch.cuda.set_device(device)
            launch(bound)

    with ThreadPoolExecutor(max_workers=min(MAX_WORKERS, len(launches))) as pool:
        for future in [pool.submit(attempt, launch) for launch in launches]:
            future.result()
    if device is not None:
        torch.cuda.synchronize(device)
