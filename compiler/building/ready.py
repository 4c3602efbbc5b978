"""The callable state of a compiled model: binds arguments, runs the stitched module and builds the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from piecegraph.compiler.building.bound_weights import BoundWeights
from piecegraph.compiler.building.build import BuildResult
from piecegraph.compiler.building.captured_models import add_running_model
from piecegraph.compiler.common.ambient_state import AmbientState
from piecegraph.compiler.common.report import CompileReport
from piecegraph.compiler.piece_compilers.protocol import CompiledPiece, RunPiece
from piecegraph.compiler.splitting.overlaps import OverlapCheck
from piecegraph.compiler.splitting.plan import Plan
from piecegraph.compiler.splitting.segments import Lifetimes
from piecegraph.compiler.splitting.stitch import Forward
from piecegraph.compiler.tracing.signature import Interface, SizeInput, TensorLeaf
from piecegraph.errors import InputMismatch

SIZES_REMEMBERED = 4096
"""The number of size combinations whose checks and chosen pieces are remembered; the memory is cleared beyond it."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A plan, the functions that its steps run, and the values of its arguments."""

    plan: Plan
    pieces: tuple[RunPiece, ...]  # by unique index; static ones where these arguments' sizes have them
    namespace: Mapping[str, Any]
    arguments: tuple[Any, ...]
    build: Callable[[Sequence[Any]], Any]  # makes the model's result from the plan's results
    lifetimes: Lifetimes  # of the plan's values


class ReadyModel:
    """A model that can be called, made from a trace or from a cached plan. Every call checks `weights` for changes."""

    def __init__(self, interface: Interface, built: BuildResult, weights: BoundWeights) -> None:
        self.built = built
        self.interface = interface
        self._call_spec = interface.call_spec
        self._result_spec = interface.result_spec
        self._size_symbols = interface.size_symbols
        self.weights = weights
        self._forward_at: dict[tuple[tuple[str, int], ...], Forward] = {}  # for sizes that were checked
        self._num_failures = 0  # failed pieces at the last update of `_forward_at`
        self._overlaps = OverlapCheck(built.plan, built.namespace)
        self._checks_overlaps = self._overlaps.is_needed
        leaves = [leaf.device.type for leaf in interface.call_spec.leaves if isinstance(leaf, TensorLeaf)]
        self._device_types = tuple(dict.fromkeys([*leaves, *(t.device.type for _, t in self.bound_tensors())]))
        self._state = AmbientState.current(self._device_types)  # at the trace; part of a plan's key

    def with_report(self, report: CompileReport) -> ReadyModel:
        """Return the same model with another report. The model must not have been called yet."""
        return ReadyModel(self.interface, replace(self.built, report=report), self.weights)

    def put_piece(self, index: int, piece: CompiledPiece, *, is_watched: bool) -> None:
        """Run unique piece `index` as `piece` from the next call on; watch its first runs if `is_watched`."""
        self.built.forwards.put(index, piece.run, piece.fallback if is_watched else None)
        self._forward_at.clear()

    def adopt(self, built: BuildResult) -> None:
        """Run the pieces of `built`, which has the same plan and namespace, from the next call on."""
        assert built.plan is self.built.plan and built.namespace is self.built.namespace, "another model's pieces"
        self.built = built
        self._forward_at.clear()
        self._num_failures = 0

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model and return its result. Raises `InputMismatch` for arguments or weights that do not match."""
        self._state.check(AmbientState.current(self._device_types))
        values, sizes = self._call_spec.bind(args, kwargs)
        key = tuple(sizes.items())
        forward = self._forward_at.get(key)
        is_first = forward is None
        if forward is None:
            self._check_sizes(sizes)
            forward = self.built.forwards.watched_at(self._by_symbol(sizes))
        if not self.weights.are_unchanged():
            self.weights.follow_moved_memory()
        add_running_model(self)
        arguments = self._arguments(values, sizes)
        if self._checks_overlaps:
            self._overlaps.check(arguments)
        with torch.no_grad():
            outputs = forward(*arguments)
        if is_first:
            self._remember(key, sizes)
        return self._result_spec.build(outputs, values)

    def _remember(self, key: tuple[tuple[str, int], ...], sizes: Mapping[str, int]) -> None:
        """Use the unwatched function for these sizes from now on, after a call with them has run."""
        forwards = self.built.forwards
        if len(self._forward_at) >= SIZES_REMEMBERED or forwards.num_failures != self._num_failures:
            self._forward_at.clear()
        self._num_failures = forwards.num_failures
        self._forward_at[key] = forwards.at(self._by_symbol(sizes))

    def parts(self, args: Sequence[Any]) -> Parts:
        """Return the plan with its functions and values for these arguments. Raises `InputMismatch` as `run` does."""
        self._state.check(AmbientState.current(self._device_types))
        values, sizes = self._call_spec.bind(args, {})
        self._check_sizes(sizes)
        if not self.weights.are_unchanged():
            self.weights.follow_moved_memory()
        add_running_model(self)
        arguments = self._arguments(values, sizes)
        if self._checks_overlaps:
            self._overlaps.check(arguments)
        return Parts(
            plan=self.built.plan,
            pieces=self.built.forwards.pieces(self._by_symbol(sizes)),
            namespace=self.built.namespace,
            arguments=arguments,
            build=lambda results: self._result_spec.build(results, values),
            lifetimes=self._lifetimes,
        )

    @cached_property
    def _lifetimes(self) -> Lifetimes:
        return Lifetimes(self.built.plan)

    def _by_symbol(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {symbol: sizes[name] for symbol, name in self._size_symbols.items()}

    def _arguments(self, values: Sequence[Any], sizes: Mapping[str, int]) -> tuple[Any, ...]:
        return tuple(sizes[i.name] if isinstance(i, SizeInput) else values[i.leaf] for i in self.interface.arguments)

    def bound_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return every parameter, buffer and constant that the pieces read, by name."""
        named = [(slot.name, self.built.namespace[slot.name]) for slot in self.built.plan.bound]
        return [(name, value) for name, value in named if isinstance(value, torch.Tensor)]

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raise `InputMismatch` if these sizes break a condition on which the trace relies."""
        by_symbol = self._by_symbol(sizes)
        for condition in self.built.size_conditions:
            if condition.is_violated_by(by_symbol):
                text = condition.with_size_names(self._size_symbols)
                raise InputMismatch(
                    f"sizes {dict(sizes)} do not satisfy {text}, on which the model's code relies. Compile the module "
                    "once more for such calls, with an example of that size and without its name in dynamic_dims."
                )
