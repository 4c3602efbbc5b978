"""The canonical text of a piece, which is equal for equal pieces, and the unique pieces of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.common.split_ops import op_name
from piecegraph.compiler.common.symbolic_sizes import shape_env_of, symbol_range
from piecegraph.compiler.splitting.split import Piece, attribute_of
from piecegraph.compiler.tracing.python_kernels import is_own_function, own_function_fact
from piecegraph.compiler.tracing.read_facts import NotComparable
from piecegraph.passes.matching.torch_ir import value_of
from piecegraph.passes.ops.op_types import OpOverload


@dataclass(frozen=True, slots=True, kw_only=True)
class UniquePiece:
    """A group of pieces with one canonical key: one compile, one artifact."""

    index: int
    key: str  # sha256 of `text`, hex
    text: str
    graph_module: fx.GraphModule  # of the first piece with this key
    pieces: tuple[int, ...]  # indices of the pieces that share it
    shares_memory: bool = False  # between inputs, or with an output, while some of it is written

    @property
    def examples(self) -> tuple[Any, ...]:
        """The fake tensors and symbolic sizes of the placeholders, in order."""
        return tuple(value_of(node) for node in self.graph_module.graph.nodes if node.op == "placeholder")

    @property
    def num_nodes(self) -> int:
        """The number of operations in the piece, without inputs and output."""
        return sum(node.op not in ("placeholder", "output", "get_attr") for node in self.graph_module.graph.nodes)


def unique_pieces(pieces: Sequence[Piece]) -> tuple[UniquePiece, ...]:
    """Group pieces by canonical key, in order of first appearance."""
    texts: dict[str, list[int]] = {}
    for piece in pieces:
        texts.setdefault(canonical_text(piece.graph_module, piece.shared), []).append(piece.index)
    return tuple(
        UniquePiece(
            index=index,
            key=hashlib.sha256(text.encode()).hexdigest(),
            text=text,
            graph_module=pieces[shared[0]].graph_module,
            pieces=tuple(shared),
            shares_memory=bool(pieces[shared[0]].shared),
        )
        for index, (text, shared) in enumerate(texts.items())
    )


def canonical_text(graph_module: fx.GraphModule, shared: Sequence[Sequence[int]] = ()) -> str:
    """Return a text that is equal for two pieces exactly when one artifact serves both.

    Nodes are numbered and symbols renamed in order of appearance; tensors are described by dtype,
    device type (never an index: a rank is not a property of a piece), sizes, strides and offset; floats
    are written in hex. `shared` are inputs and outputs, counted through, that lie in one memory (`Piece.shared`).
    Raises `TypeError` on a kind of argument that has no canonical text.
    """
    lines = [f"one memory: {', '.join(map(str, positions))}" for positions in shared]
    return "\n".join([_Canonical(graph_module).text(), *lines])


class _Canonical:
    """A writer of the canonical text of one piece."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.numbers: dict[fx.Node, int] = {}
        self.symbols: dict[Any, str] = {}
        self.devices: dict[tuple[str, int | None], str] = {}
        values = [value_of(node) for node in graph_module.graph.nodes]
        self.shape_env = shape_env_of(values)

    def text(self) -> str:
        lines = []
        for number, node in enumerate(self.graph_module.graph.nodes):
            self.numbers[node] = number
            if node.op == "placeholder":
                lines.append(f"%{number} = input {self.value(value_of(node))}")
            elif node.op == "get_attr":
                lines.append(f"%{number} = {self.attribute(str(node.target))}")
            elif node.op == "output":
                lines.append(f"return {self.argument(node.args[0])}")
            else:
                target = str(node.target) if node.op == "call_method" else self.function(node.target)
                kwargs = {name: node.kwargs[name] for name in sorted(node.kwargs)}
                lines.append(f"%{number} = {node.op} {target} {self.argument(node.args)} {self.argument(kwargs)}")
        return "\n".join([*lines, *(f"{name} in {self.range(symbol)}" for symbol, name in self.symbols.items())])

    def range(self, symbol: Any) -> str:
        return symbol_range(self.shape_env, symbol)

    def function(self, target: Any) -> str:
        name = op_name(target)
        if is_own_function(target):
            try:
                return f"{name} {own_function_fact(target)}"
            except NotComparable:  # no other object is known to compute the same; such a piece is not stored
                return f"{name} of this process {id(target)}"
        return f"{name}.{target._overloadname}" if isinstance(target, OpOverload) else name

    def attribute(self, path: str) -> str:
        value = attribute_of(self.graph_module, path)
        if isinstance(value, fx.GraphModule):
            inner = canonical_text(value).replace("\n", "; ")
            return f"graph {{ {inner} }}"
        raise TypeError(f"a piece holds {path}, a {type(value).__name__}, which has no canonical text")

    def device(self, device: torch.device) -> str:
        """Return the type of a device, with a number only where the piece uses several devices of that type."""
        name = self.devices.setdefault((device.type, device.index), "")
        if not name:
            nth = sum(kind == device.type for kind, _ in self.devices) - 1
            name = self.devices[(device.type, device.index)] = device.type + (f"#{nth}" if nth else "")
        return name

    def expression(self, expression: Any) -> str:
        names = {}
        for symbol in sorted(expression.free_symbols, key=str):
            names[symbol] = self.symbols.setdefault(symbol, f"$s{len(self.symbols)}")
        return (
            str(expression.xreplace({s: type(s)(n, **s.assumptions0) for s, n in names.items()}))
            if names
            else str(expression)
        )

    def value(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            shape, stride = self.argument(tuple(value.shape)), self.argument(tuple(value.stride()))
            offset = self.argument(value.storage_offset())
            subclass = "" if type(value).__name__ == "FakeTensor" else f" {type(value).__name__}"
            return f"{value.dtype} {self.device(value.device)} {shape} {stride} +{offset}{subclass}"
        return self.argument(value)

    def argument(self, value: Any) -> str:
        match value:
            case fx.Node():
                return f"%{self.numbers[value]}"
            case torch.SymInt() | torch.SymBool() | torch.SymFloat():
                return f"<{self.expression(value.node.expr)}>"
            case bool() | int() | str() | None:
                return repr(value)
            case float():
                return value.hex()
            case complex():
                return f"({value.real.hex()},{value.imag.hex()})"
            case slice():
                return f"slice({self.argument(value.start)},{self.argument(value.stop)},{self.argument(value.step)})"
            case tuple() | list():
                opening, closing = "()" if isinstance(value, tuple) else "[]"
                return opening + ",".join(map(self.argument, value)) + closing
            case dict():
                return "{" + ",".join(f"{self.argument(k)}:{self.argument(v)}" for k, v in value.items()) + "}"
            case torch.device():
                return f"device {self.device(value)}"
            case torch.dtype() | torch.layout() | torch.memory_format():
                return str(value)
            case _ if value is Ellipsis:
                return "..."
            case OpOverload():
                return self.function(value)
            case _ if callable(value) and hasattr(value, "__qualname__"):
                return self.function(value)
        raise TypeError(f"an argument of type {type(value).__name__} has no canonical text: {value!r}")
