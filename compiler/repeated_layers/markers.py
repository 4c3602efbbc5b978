"""Markers that layers leave in a graph while they are traced: at their begin and end, or in place of a whole layer."""

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

from piecegraph.compiler.repeated_layers.find import LayerKind

_library = torch.library.Library("piecegraph", "FRAGMENT")
for _name in ("layer_begin", "layer_end"):
    _library.define(f"{_name}(Tensor x, Tensor[] tensors, str layer, str how) -> ()")
    torch.library.register_fake(f"piecegraph::{_name}", lambda *_: None, lib=_library)
_library.define("layer_repeated(Tensor x, Tensor[] tensors, str layer, str how) -> Tensor")
torch.library.register_fake(
    "piecegraph::layer_repeated", lambda x, *_: x.new_empty_strided(x.shape, x.stride()), lib=_library
)

LAYER_BEGIN: Any = torch.ops.piecegraph.layer_begin.default
LAYER_END: Any = torch.ops.piecegraph.layer_end.default
LAYER_REPEATED: Any = torch.ops.piecegraph.layer_repeated.default
"""The ops of the markers. `x` is the first input of a layer, or its result; `tensors` are all its inputs that are
tensors; `how` describes the structure of its inputs and the plain ones, as they are when the layer begins or ends."""

UNKNOWN = "?"
"""The word in `how` for an input that is neither a tensor nor plain."""

RETURNS_INPUT = "returns its input"
"""The `how` at the end of a layer that returns the very tensor it takes first."""

RETURNS_PAIR = "a layer returns neither a tensor, as those alike do, nor a tuple of one and None"
"""The message of the error for a layer that returns something else than `mark_layers` was told."""

_OUR_FRAME = re.compile(rf'^  File "{re.escape(__file__)}", .*\n(?:    .*\n)*', re.MULTILINE)
"""A pattern for the frames that the markers add to a stack trace."""


class Marker(NamedTuple):
    """The arguments of a marker node."""

    x: fx.Node
    tensors: Sequence[fx.Node]
    layer: str
    how: str

    @property
    def places(self) -> list[int]:
        """The first position of each tensor among `tensors`."""
        return [list(self.tensors).index(each) for each in self.tensors]


def parse_marker(node: fx.Node) -> Marker:
    """Return the arguments of a marker node."""
    arguments: Any = node.args
    return Marker(*arguments)


_tracing = threading.RLock()
"""The lock that lets one trace at a time use markers."""


@contextmanager
def mark_layers(kinds: Sequence[LayerKind], *, is_pair: bool = False) -> Iterator[None]:
    """Trace markers in place of the middle layers of each kind inside this block, and around the first and the last.

    Each layer returns a tensor or, where `is_pair`, each returns a tuple of a tensor and None; the trace fails with
    `RETURNS_PAIR` if one returns a tuple and not the other. Other threads may call the layers as before.
    """
    changed: list[nn.Module] = []
    with _tracing:
        try:
            for kind in kinds:
                for layer in kind.layers:
                    forward = _replaced if layer in kind.middle else _marked
                    made = forward(type(layer.module), layer.name, is_pair)
                    vars(layer.module)["forward"] = MethodType(made, layer.module)
                    changed.append(layer.module)
            yield
        finally:
            for module in changed:
                vars(module).pop("forward", None)


def _marked(real: Any, name: str, is_pair: bool) -> Callable[..., Any]:
    """Return a `forward` that, while it is traced, has a marker at its begin and at its end."""

    @functools.wraps(real.forward)
    def forward(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return real.forward(self, x, *args, **kwargs)
        tensors, how = _flatten(x, args, kwargs)
        torch.ops.piecegraph.layer_begin.default(x, tensors, name, how)
        out = real.forward(self, x, *args, **kwargs)
        if (type(out) is tuple) is not is_pair or (is_pair and (len(out) != 2 or out[1] is not None)):
            raise TypeError(RETURNS_PAIR)
        result = out[0] if is_pair else out
        tensors, how = _flatten(x, args, kwargs)
        torch.ops.piecegraph.layer_end.default(result, tensors, name, RETURNS_INPUT if result is x else how)
        return out

    return forward


def _replaced(real: Any, name: str, is_pair: bool) -> Callable[..., Any]:
    """Return a `forward` that, while it is traced, is one marker."""

    @functools.wraps(real.forward)
    def forward(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return real.forward(self, x, *args, **kwargs)
        tensors, how = _flatten(x, args, kwargs)
        result = torch.ops.piecegraph.layer_repeated.default(x, tensors, name, how)
        return (result, None) if is_pair else result

    return forward


def _flatten(*arguments: Any) -> tuple[list[torch.Tensor], str]:
    """Return the tensors among a layer's arguments, and a text of the other arguments and the modes of torch.

    Dynamo traces this function, so its code is simple.
    """
    tensors: list[torch.Tensor] = []
    autocast = f"{torch.is_autocast_enabled('cpu')} {torch.is_autocast_enabled('cuda')}"
    how = [f"{torch.is_grad_enabled()} {autocast} {torch.get_default_dtype()}"]
    _flatten_into(arguments, tensors, how)
    return tensors, " ".join(how)


def _flatten_into(value: Any, tensors: list[torch.Tensor], how: list[str]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        how.append("tensor")
    elif type(value) is tuple or type(value) is list:
        how.append("tuple(" if type(value) is tuple else "list(")
        for item in value:
            _flatten_into(item, tensors, how)
        how.append(")")
    elif type(value) is dict:
        how.append("dict(")
        for key in value:
            _flatten_into(key, tensors, how)
            _flatten_into(value[key], tensors, how)
        how.append(")")
    elif value is None or isinstance(value, (bool, int, float, str)):
        how.append(f"{value!r}")
    else:
        how.append(UNKNOWN)


def strip_marker_frames(graph: fx.Graph) -> None:
    """Remove the frames that markers added from the stack traces of all nodes."""
    for node in graph.nodes:
        if "stack_trace" in node.meta:
            node.meta["stack_trace"] = _OUR_FRAME.sub("", node.meta["stack_trace"])


def find_nested_marker(graph_module: fx.GraphModule) -> str | None:
    """Return the name of a layer that a higher-order op runs (`torch.cond`, a checkpoint); None where there is none."""
    for module in graph_module.modules():
        if module is not graph_module and isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.target in (LAYER_BEGIN, LAYER_END, LAYER_REPEATED):
                    return parse_marker(node).layer
    return None
