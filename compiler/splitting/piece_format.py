"""A piece as plain data, and back: the input of a compile process, with nothing pickled.

Sizes are written as expressions over symbols. Reading makes new symbols with the same ranges in a
new shape environment, so the compiled code depends on this data alone and not on the trace of the
piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.common.call_targets import qualified_name, resolve_function
from piecegraph.compiler.common.fake_values import fake_tensor, fresh_fake_mode, propagate_fakes
from piecegraph.compiler.common.symbolic_sizes import evaluate_size, make_symbols, shape_env_of, symbol_facts
from piecegraph.compiler.torch_compat.fake_tensors import FakeTensorMode
from piecegraph.compiler.torch_compat.versions import undecided_layouts_are_contiguous
from piecegraph.passes.matching.torch_ir import value_of

_KNOWN_NAMESPACES = frozenset({"aten", "prim", "prims", "higher_order", "inductor", "piecegraph"})

_TORCH_MODULES = frozenset({"torch", "_operator", "operator", "math", "builtins"})


class NotExpressible(Exception):
    """An error for a piece that cannot be written as plain data. The message says why."""


def dump_piece(graph_module: fx.GraphModule) -> str:
    """Return the piece as JSON. Raises `NotExpressible`."""
    return json.dumps(_Writer(graph_module).piece())


def load_piece(text: str, sizes: Mapping[str, int] | None = None) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """Return the piece that `dump_piece` wrote, with one fake tensor or symbolic size a placeholder.

    With `sizes`, a number for each of its symbols, the piece is static: it has no placeholders for sizes
    (torch would make such a number a symbol again) and takes the tensors alone, in the same order.
    """
    data, fake_mode = json.loads(text), fresh_fake_mode()
    if sizes is None:
        return _Reader(data, make_symbols(fake_mode, data["symbols"])).piece(fake_mode)
    numbers = {symbol["name"]: sizes[symbol["name"]] for symbol in data["symbols"]}
    return _Reader(data, numbers, is_static=True).piece(fake_mode)


def load_graph(text: str) -> fx.GraphModule:
    """Return the graph of a dynamic piece that `dump_piece` wrote, to be run: its nodes have no values in `meta`.

    Raises `KeyError` where an argument is a symbolic size that is not a node.
    """
    return _Reader(json.loads(text), {}).graph()


def find_process_local_function(graph_module: fx.GraphModule) -> str | None:
    """Return the name of a function that a process with torch and our ops lacks; None where there is none."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            name = qualified_name(node.target)
            operators = re.match(r"torch\.ops\.(\w+)\.", name)
            if operators is not None and operators.group(1) not in _KNOWN_NAMESPACES:
                return name
            if name.partition(".")[0] not in _TORCH_MODULES:
                return name
    return None


class _Writer:
    """A writer of one graph as plain data."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph = graph_module.graph
        self.numbers = {node: number for number, node in enumerate(self.graph.nodes)}
        self.symbols: dict[Any, None] = {}

    def piece(self) -> dict[str, Any]:
        nodes = [self.node(node) for node in self.graph.nodes]
        shape_env = shape_env_of([value_of(node) for node in self.graph.nodes])
        symbols = [symbol_facts(shape_env, symbol) for symbol in self.symbols]
        return {"symbols": symbols, "nodes": nodes}

    def node(self, node: fx.Node) -> list[Any]:
        if isinstance(value_of(node), torch.SymFloat):  # torch.compile(dynamic=True) makes the model's floats inputs
            raise NotExpressible("it computes with a float that torch made an input")
        if node.op == "placeholder":
            return ["placeholder", node.name, self.value(value_of(node))]
        if node.op == "output":
            return ["output", node.name, self.argument(node.args[0])]
        if node.op == "call_method":
            return [
                "call_method",
                node.name,
                str(node.target),
                self.argument(node.args),
                self.argument(dict(node.kwargs)),
            ]
        if node.op == "call_function":
            target = self.function(node.target)
            return ["call_function", node.name, target, self.argument(node.args), self.argument(dict(node.kwargs))]
        raise NotExpressible(f"it holds a subgraph ({node.target})")

    def function(self, target: Any) -> str:
        name = qualified_name(target)
        try:
            found = resolve_function(name)
        except (ImportError, AttributeError):
            found = None
        if found is not target:
            raise NotExpressible(f"it calls {name}, which only this process knows")
        return name

    def value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value).__name__ != "FakeTensor":
                raise NotExpressible(f"it takes a {type(value).__name__}")
            return {
                "dtype": str(value.dtype).removeprefix("torch."),
                "device": str(value.device),
                "shape": [self.size(size) for size in value.shape],
                "stride": [self.size(stride) for stride in value.stride()],
                "offset": self.size(value.storage_offset()),
            }
        return {"size": self.size(value)}

    def size(self, size: Any) -> int | str:
        if isinstance(size, int):
            return size
        if not isinstance(size, torch.SymInt):
            raise NotExpressible(f"it takes a {type(size).__name__}")
        self.symbols |= dict.fromkeys(sorted(size.node.expr.free_symbols, key=str))
        return str(size.node.expr)

    def argument(self, value: Any) -> Any:
        match value:
            case fx.Node():
                return {"node": self.numbers[value]}
            case bool() | int() | str() | None:
                return value
            case float():
                return {"float": value.hex()}
            case tuple():
                return {"tuple": [self.argument(item) for item in value]}
            case list():
                return [self.argument(item) for item in value]
            case dict():
                return {"dict": [[self.argument(k), self.argument(v)] for k, v in value.items()]}
            case slice():
                return {"slice": [self.argument(part) for part in (value.start, value.stop, value.step)]}
            case torch.dtype() | torch.layout() | torch.memory_format():
                return {"torch": str(value).removeprefix("torch.")}
            case torch.device():
                return {"device": str(value)}
            case torch.SymInt():
                return {"size": self.size(value)}
            case _ if value is Ellipsis:
                return {"ellipsis": True}
        raise NotExpressible(f"it has an argument of type {type(value).__name__}")


class _Reader:
    """A reader of one graph from plain data."""

    def __init__(
        self, data: dict[str, Any], symbols: Mapping[str, torch.SymInt | int], *, is_static: bool = False
    ) -> None:
        """Store the data, and the value of each symbol. With `is_static` they are numbers and no placeholders."""
        self.data = data
        self.symbols = symbols
        self.is_static = is_static
        self.nodes: list[fx.Node | int] = []

    def piece(self, fake_mode: FakeTensorMode) -> tuple[fx.GraphModule, tuple[Any, ...]]:
        graph_module = self.graph()
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        described = [rest[0] for op, _, *rest in self.data["nodes"] if op == "placeholder"]
        taken = [value for value in described if not (self.is_static and "size" in value)]
        examples = tuple(self.example(value, fake_mode) for value in taken)
        for node, example in zip(placeholders, examples, strict=True):
            node.meta["example_value"] = example
        with undecided_layouts_are_contiguous():
            propagate_fakes(graph_module, list(examples), fake_mode)
        return graph_module, examples

    def graph(self) -> fx.GraphModule:
        graph = fx.Graph()
        for op, name, *rest in self.data["nodes"]:
            if op == "placeholder" and self.is_static and "size" in rest[0]:
                self.nodes.append(self.size(rest[0]["size"]))
                continue
            if op == "placeholder":
                node = graph.placeholder(name)
            elif op == "output":
                node = graph.output(self.argument(rest[0]))
            else:
                target = resolve_function(rest[0]) if op == "call_function" else rest[0]
                node = graph.create_node(op, target, self.argument(rest[1]), self.argument(rest[2]), name)
            self.nodes.append(node)
        return fx.GraphModule({}, graph)

    def example(self, value: dict[str, Any], fake_mode: FakeTensorMode) -> Any:
        if "size" in value:
            return self.size(value["size"])
        return fake_tensor(
            fake_mode,
            shape=[self.size(size) for size in value["shape"]],
            stride=[self.size(stride) for stride in value["stride"]],
            offset=self.size(value["offset"]),
            dtype=getattr(torch, value["dtype"]),
            device=torch.device(value["device"]),
        )

    def size(self, size: int | str) -> Any:
        return size if isinstance(size, int) else evaluate_size(size, self.symbols)

    def argument(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.argument(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        match kind:
            case "node":
                return self.nodes[content]
            case "float":
                return float.fromhex(content)
            case "tuple":
                return tuple(self.argument(item) for item in content)
            case "dict":
                return {self.argument(k): self.argument(v) for k, v in content}
            case "slice":
                return slice(*(self.argument(part) for part in content))
            case "torch":
                return getattr(torch, content)
            case "device":
                return torch.device(content)
            case "size":
                return self.size(content)
            case "ellipsis":
                return ...
        raise AssertionError(f"unknown kind of argument {kind!r}")
