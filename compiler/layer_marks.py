"""What a layer leaves in a graph while it is traced: where it begins and ends, or one node in place of all of it."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from piecegraph.compiler.alike_layers import Kind

_library = torch.library.Library("piecegraph", "FRAGMENT")
for _name in ("layer_begins", "layer_ends"):
    _library.define(f"{_name}(Tensor x, Tensor[] tensors, str layer, str how) -> ()")
    torch.library.register_fake(f"piecegraph::{_name}", lambda *_: None, lib=_library)
_library.define("layer_again(Tensor x, Tensor[] tensors, str layer, str how) -> Tensor")
torch.library.register_fake(
    "piecegraph::layer_again", lambda x, *_: x.new_empty_strided(x.shape, x.stride()), lib=_library
)

BEGINS: Any = torch.ops.piecegraph.layer_begins.default
ENDS: Any = torch.ops.piecegraph.layer_ends.default
AGAIN: Any = torch.ops.piecegraph.layer_again.default
"""`x`: what a layer takes first, or what it returns; `tensors`: all that it takes; `how`: where those stand, and what
it takes besides, as it is when the layer begins or ends."""

UNKNOWN = "?"
"""Stands in `how` for what is neither a tensor nor plain."""

GIVEN_BACK = "given back"
"""How a layer ends that returns the very tensor it takes first."""

_OUR_FRAME = re.compile(rf'^  File "{re.escape(__file__)}", .*\n(?:    .*\n)*', re.MULTILINE)
"""Of a stack trace, what only a mark put there."""


class Mark(NamedTuple):
    """What a mark says."""

    x: fx.Node
    tensors: Sequence[fx.Node]
    layer: str
    how: str

    @property
    def places(self) -> list[int]:
        """Where each of the tensors stands first."""
        return [list(self.tensors).index(each) for each in self.tensors]


def said(mark: fx.Node) -> Mark:
    arguments: Any = mark.args
    return Mark(*arguments)


_tracing = threading.RLock()
"""One trace at a time has marks."""


@contextmanager
def traced_twice(kinds: Sequence[Kind]) -> Iterator[None]:
    """What is traced inside this block has marks in place of all layers but the first and the last of each kind. Other
    threads may call the layers as ever."""
    changed: list[nn.Module] = []
    with _tracing:
        try:
            for kind in kinds:
                for layer in kind.layers:
                    forward = _again if layer in kind.between else _marked
                    vars(layer.module)["forward"] = MethodType(forward(type(layer.module), layer.name), layer.module)
                    changed.append(layer.module)
            yield
        finally:
            for module in changed:
                vars(module).pop("forward", None)


def _marked(real: Any, name: str) -> Callable[..., Any]:
    @functools.wraps(real.forward)
    def forward(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return real.forward(self, x, *args, **kwargs)
        tensors, how = _taken_apart(x, args, kwargs)
        torch.ops.piecegraph.layer_begins.default(x, tensors, name, how)
        out = real.forward(self, x, *args, **kwargs)
        tensors, how = _taken_apart(x, args, kwargs)
        torch.ops.piecegraph.layer_ends.default(out, tensors, name, GIVEN_BACK if out is x else how)
        return out

    return forward


def _again(real: Any, name: str) -> Callable[..., Any]:
    @functools.wraps(real.forward)
    def forward(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return real.forward(self, x, *args, **kwargs)
        tensors, how = _taken_apart(x, args, kwargs)
        return torch.ops.piecegraph.layer_again.default(x, tensors, name, how)

    return forward


def _taken_apart(*arguments: Any) -> tuple[list[torch.Tensor], str]:
    """The tensors of a layer's arguments, and the rest of them, and modes that it may ask for, as text. It is traced,
    so it is plain."""
    tensors: list[torch.Tensor] = []
    autocast = f"{torch.is_autocast_enabled('cpu')} {torch.is_autocast_enabled('cuda')}"
    how = [f"{torch.is_grad_enabled()} {autocast} {torch.get_default_dtype()}"]
    _take_apart(arguments, tensors, how)
    return tensors, " ".join(how)


def _take_apart(value: Any, tensors: list[torch.Tensor], how: list[str]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        how.append("tensor")
    elif type(value) is tuple or type(value) is list:
        how.append("tuple(" if type(value) is tuple else "list(")
        for item in value:
            _take_apart(item, tensors, how)
        how.append(")")
    elif type(value) is dict:
        how.append("dict(")
        for key in value:
            _take_apart(key, tensors, how)
            _take_apart(value[key], tensors, how)
        how.append(")")
    elif value is None or isinstance(value, (bool, int, float, str)):
        how.append(f"{value!r}")
    else:
        how.append(UNKNOWN)


def take_frames_out(graph: fx.Graph) -> None:
    """Of stack traces, those that only a mark put there."""
    for node in graph.nodes:
        if "stack_trace" in node.meta:
            node.meta["stack_trace"] = _OUR_FRAME.sub("", node.meta["stack_trace"])


def mark_inside(graph_module: fx.GraphModule) -> str | None:
    """A layer with a mark in a graph that an op runs (`torch.cond`, a checkpoint); None: there is none."""
    for module in graph_module.modules():
        if module is not graph_module and isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.target in (BEGINS, ENDS, AGAIN):
                    return said(node).layer
    return None
