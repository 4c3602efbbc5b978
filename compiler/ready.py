"""A compiled model that can be called: it binds arguments, runs the stitched module and builds the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from piecegraph.compiler.build import Built
from piecegraph.compiler.graphs.stretches import Lifetimes
from piecegraph.compiler.interface import Interface
from piecegraph.compiler.piece_compiler import RunPiece
from piecegraph.compiler.plan import Plan
from piecegraph.compiler.repeated_steps import Repeat, find_repeat
from piecegraph.compiler.report import CompileReport
from piecegraph.compiler.stitch import Forward
from piecegraph.compiler.trace import BoundInput, SizeInput
from piecegraph.errors import InputMismatch

WEIGHT_CHECK_INTERVAL = 1024
"""Calls between two checks that the module's parameters and buffers are still the bound tensors."""

SIZES_REMEMBERED = 4096
"""Combinations of sizes whose relations were checked and whose pieces are chosen; past that many, anew."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A plan, what its steps run, and the values of its arguments."""

    plan: Plan
    pieces: tuple[RunPiece, ...]  # by unique index; static ones where these arguments' sizes have them
    namespace: Mapping[str, Any]
    arguments: tuple[Any, ...]
    build: Callable[[Sequence[Any]], Any]  # the plan's results to the model's result
    lifetimes: Lifetimes  # of the plan's values
    repeat: Repeat | None  # of the plan's steps


class Ready:
    """What a trace, or a plan from the cache, comes to. `weights` are watched."""

    def __init__(self, interface: Interface, built: Built, weights: Weights) -> None:
        self.built = built
        self.interface = interface
        self._call_spec = interface.call_spec
        self._result_spec = interface.result_spec
        self._size_symbols = interface.size_symbols
        self._weights = weights
        self._forward_at: dict[tuple[tuple[str, int], ...], Forward] = {}  # for sizes known to be right
        self._calls = 0

    def with_report(self, report: CompileReport) -> Ready:
        """The same model, reported otherwise; it has not been called yet."""
        return Ready(self.interface, replace(self.built, report=report), self._weights)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        values, sizes = self._call_spec.bind(args, kwargs)
        key = tuple(sizes.items())
        forward = self._forward_at.get(key)
        if forward is None:
            self._check_sizes(sizes)
            if len(self._forward_at) >= SIZES_REMEMBERED:
                self._forward_at.clear()
            forward = self._forward_at[key] = self.built.forwards.at(self._by_symbol(sizes))
        if self._calls % WEIGHT_CHECK_INTERVAL == 0:
            self._weights.check()
        self._calls += 1
        with torch.no_grad():
            outputs = forward(*self._arguments(values, sizes))
        return self._result_spec.build(outputs, values)

    def parts(self, args: Sequence[Any]) -> Parts:
        values, sizes = self._call_spec.bind(args, {})
        self._check_sizes(sizes)
        return Parts(
            plan=self.built.plan,
            pieces=self.built.forwards.pieces(self._by_symbol(sizes)),
            namespace=self.built.namespace,
            arguments=self._arguments(values, sizes),
            build=lambda results: self._result_spec.build(results, values),
            lifetimes=self._lifetimes,
            repeat=self._repeat,
        )

    @cached_property
    def _lifetimes(self) -> Lifetimes:
        return Lifetimes(self.built.plan)

    @cached_property
    def _repeat(self) -> Repeat | None:
        return find_repeat(self.built.plan)

    def _by_symbol(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {symbol: sizes[name] for symbol, name in self._size_symbols.items()}

    def _arguments(self, values: Sequence[Any], sizes: Mapping[str, int]) -> tuple[Any, ...]:
        return tuple(sizes[i.name] if isinstance(i, SizeInput) else values[i.leaf] for i in self.interface.arguments)

    def bound_tensors(self) -> list[tuple[str, torch.Tensor]]:
        named = [(slot.name, self.built.namespace[slot.name]) for slot in self.built.plan.bound]
        return [(name, value) for name, value in named if isinstance(value, torch.Tensor)]

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raise `InputMismatch` if these sizes break a relation the trace relies on."""
        by_symbol = self._by_symbol(sizes)
        for condition in self.built.size_conditions:
            if condition.is_broken_by(by_symbol):
                text = condition.named(self._size_symbols)
                raise InputMismatch(f"sizes {dict(sizes)} do not satisfy {text}, on which the model's code relies.")


class Weights:
    """The parameters and buffers bound at compile time, and where in the module they were."""

    def __init__(self, module: torch.nn.Module, bound_inputs: Iterable[BoundInput]) -> None:
        self._places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, str]] = []
        for bound in bound_inputs:
            if bound.kind in ("parameter", "buffer"):
                path, _, name = bound.name.rpartition(".")
                owner = module.get_submodule(path)
                registry: Any = owner._parameters if bound.kind == "parameter" else owner._buffers
                self._places.append((registry, name, bound.tensor, bound.name))

    def check(self) -> None:
        """Raise `InputMismatch` if one was replaced by another tensor."""
        for registry, name, tensor, path in self._places:
            if registry.get(name) is not tensor:
                raise InputMismatch(
                    f"{path} was replaced after the model was compiled, and the compiled pieces still read the old "
                    "tensor. "
                    "Change its values in place (tensor.copy_), or compile again."
                )
