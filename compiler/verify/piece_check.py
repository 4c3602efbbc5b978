"""Compare every value that crosses a cut with the graph as it was traced, piece by piece.

Both sides run on the same inputs. At each split op, the values made since the split op before are compared and then
replaced by the traced graph's values, so an error stays where it arises, and the first piece that shows an error
caused it. The float64, eager and compiled sides all cover the same segment, from split op to split op: passes move
cuts within a segment, and an error over two pieces must not be compared with eager's error over one. A value is
matched with the nearest value of the traced graph, and split ops report their inputs in a form all variants share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.piece_compilers.protocol import RunPiece
from piecegraph.compiler.splitting.plan import CallStep, PieceStep, Plan, Slot, slots_in
from piecegraph.compiler.verify.float64_reference import run_in_float64, to_float64, value_to_float64
from piecegraph.compiler.verify.walk import substitute_slots, walk
from piecegraph.errors import SelfcheckFailed

RATIO = 1.1
"""The largest allowed ratio of the compiled RMS error to eager's RMS error."""

NOISE = 0.5
"""The allowance beyond `RATIO`, in units of the dtype's epsilon: two right ways to round differ by as much."""

FLOAT32_NOISE = 8.0
"""The same for float32, in which sums are accumulated too, so that their order decides: n numbers that are added one
after another lose `eps / 2 * sqrt(n / 6)`, which is 5 eps for 576 numbers."""

NEAR = 0.25
"""The largest relative distance at which two values count as versions of one value."""

_TINY = 1e-30


class SplitOpView(Protocol):
    """The owner of the split ops, as a check of pieces sees it."""

    def reads(self, op: str, args: Sequence[Any]) -> Mapping[str, torch.Tensor]:
        """Return the tensors the op computes from, by name: equal for ops that passes substitute for each other."""

    def run(self, op: str, args: Sequence[Any]) -> None:
        """Compute the op by any correct implementation, and write what the op writes."""

    def written(self, op: str, args: Sequence[Any]) -> torch.Tensor:
        """Return the tensor among `args` that the op writes its result to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCheck:
    """One value at one size. Errors are RMS errors against float64, relative to the value's own RMS."""

    piece: int  # index in the compiled model of the piece that made the value, or of the last piece before the call
    value: str
    size: int
    eager: float
    compiled: float
    noise: float  # what `compiled` may exceed 1.1 times `eager` by

    @property
    def ok(self) -> bool:
        """Return whether the compiled error is within the tolerance."""
        if not math.isfinite(self.compiled):
            return not math.isfinite(self.eager)
        return self.compiled <= RATIO * self.eager + self.noise

    @property
    def ratio(self) -> float:
        """The compiled error over eager's error: 1 where neither side has an error."""
        if self.eager == 0.0:
            return 1.0 if self.compiled == 0.0 else math.inf
        return self.compiled / self.eager


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCheckResult:
    """The values that were compared at one size, and those that could not be."""

    values: tuple[ValueCheck, ...]  # in the order in which the compiled model makes them
    unmatched: tuple[str, ...]
    """Values that cross a cut and match no value of the traced graph there: they were neither compared nor replaced,
    and show only in what is computed from them."""


def check_pieces(
    compiled: CompiledModel,
    traced: CompiledModel,
    inputs: Sequence[Sequence[Any]],
    size: int,
    view: SplitOpView,
) -> PieceCheckResult:
    """Compare the pieces of `compiled` with those of `traced`: eager pieces of the same model without passes.

    `inputs` holds arguments of the model, several sets of one size, whose errors are taken together. A value is
    compared once, where it is made, and never after it was replaced by eager's. Raises `SelfcheckFailed` if the
    two sides differ in their number of split op calls.
    """
    lifted = {piece.index: to_float64(piece.graph_module) for piece in traced.unique_pieces}
    errors: dict[tuple[int, str], _Errors] = {}
    unmatched: dict[str, None] = {}
    for arguments in inputs:
        truth = _Truth(traced, lifted, view, arguments)
        _Comparison(compiled, truth, view, errors, unmatched).run(arguments)
    values = [
        ValueCheck(piece=piece, value=name, size=size, eager=found.share(0), compiled=found.share(1), noise=found.noise)
        for (piece, name), found in errors.items()
    ]
    return PieceCheckResult(values=tuple(values), unmatched=tuple(unmatched))


@dataclass(slots=True)
class _Errors:
    """Squared errors of one value, summed over sets of inputs."""

    noise: float
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of eager's and the compiled one's
    size: float = 0.0

    def add(self, exact: torch.Tensor, eager: torch.Tensor, compiled: torch.Tensor) -> None:
        for which, value in enumerate((eager, compiled)):
            self.squares[which] += float((value.double() - exact).square().sum())
        self.size += float(exact.square().sum())

    def share(self, which: int) -> float:
        return math.sqrt(self.squares[which] / max(self.size, _TINY)) if self.squares[which] >= 0 else math.nan


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of the traced graph that crosses a cut."""

    name: str
    eager: torch.Tensor
    exact: torch.Tensor  # float64, computed from eager's values at the split op before


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a split op in the traced graph."""

    name: str
    reads: Mapping[str, _Value]
    result: torch.Tensor


class _Truth:
    """One run of the traced graph, eagerly and in float64; float64 restarts from eager's values at each split op."""

    def __init__(
        self,
        traced: CompiledModel,
        lifted: Mapping[int, fx.GraphModule],
        view: SplitOpView,
        arguments: Sequence[Any],
    ) -> None:
        self.values: list[list[_Value]] = [[]]  # after each number of split ops
        self.calls: list[_Call] = []
        self._lifted, self._view = lifted, view
        parts = traced.parts(arguments)
        self._written = _written_slots(parts.plan, parts.namespace)
        self._exact: dict[str, Any] = {}  # what was made since the last split op
        self._every_exact: dict[str, Any] = {}
        result = walk(parts, self._piece, self._call)
        last = [slot.name for slot in slots_in(parts.plan.results)]
        exact = parts.build(tuple(substitute_slots(value, self._every_exact) for value in parts.plan.results))
        self.result = _Value("logits" if len(last) == 1 else ", ".join(last), result, exact)

    def _piece(self, step: PieceStep, run: RunPiece, inputs: tuple[Any, ...]) -> Sequence[Any]:
        wide_inputs = [self._exact.get(slot.name, value) for slot, value in zip(step.inputs, inputs, strict=True)]
        exact = run_in_float64(self._lifted[step.unique], wide_inputs)
        outputs = run(*inputs)
        for slot, value, wide in zip(step.outputs, outputs, exact, strict=True):
            self._exact[slot.name] = self._every_exact[slot.name] = wide
            if _is_compared(value) and slot.name not in self._written:
                self.values[-1].append(_Value(slot.name, value, wide))
        return outputs

    def _call(
        self, step: CallStep, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        exact_args = [
            self._exact.get(given.name, value_to_float64(arg)) if isinstance(given, Slot) else arg
            for given, arg in zip(step.args, args, strict=True)
        ]
        eager, exact = self._view.reads(step.op, args), self._view.reads(step.op, exact_args)
        name = str(args[-1])
        reads = {read: _Value(f"{read} of {name}", eager[read].clone(), exact[read]) for read in eager}
        self._view.run(step.op, args)
        self.calls.append(_Call(name, reads, self._view.written(step.op, args).clone()))
        self.values.append([])
        self._exact.clear()


class _Comparison:
    """One run of the compiled model over the truth's inputs."""

    def __init__(
        self,
        compiled: CompiledModel,
        truth: _Truth,
        view: SplitOpView,
        errors: dict[tuple[int, str], _Errors],
        unmatched: dict[str, None],
    ) -> None:
        self._compiled, self._truth, self._view = compiled, truth, view
        self._errors, self._unmatched = errors, unmatched
        self._made: list[tuple[torch.Tensor, _Value]] = []  # since the last split op, to be replaced there
        self._compared: set[int] = set()  # addresses; their tensors live until the walk ends
        self._num_calls = 0
        self._last_piece = 0
        self._written: frozenset[str] = frozenset()

    def run(self, arguments: Sequence[Any]) -> None:
        parts = self._compiled.parts(arguments)
        self._written = _written_slots(parts.plan, parts.namespace)
        result = walk(parts, self._piece, self._call)
        if self._num_calls != len(self._truth.calls):
            raise SelfcheckFailed(
                f"the compiled model calls {self._num_calls} split ops and the traced one {len(self._truth.calls)}: "
                "a pass lost or added some. Turn passes off one by one (--passes -name)."
            )
        self._compare(self._truth.result, result)

    def _piece(self, step: PieceStep, run: RunPiece, inputs: tuple[Any, ...]) -> Sequence[Any]:
        self._last_piece = step.index
        outputs = run(*inputs)
        memory = {value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor)}
        for slot, value in zip(step.outputs, outputs, strict=True):
            if not _is_compared(value) or slot.name in self._written:
                continue
            known = _nearest(value, self._truth.values[min(self._num_calls, len(self._truth.calls))])
            if known is None:
                self._unmatched[f"{slot.name} of piece {step.index}"] = None
                continue
            self._compare(known, value)
            if value.untyped_storage().data_ptr() not in memory:
                self._made.append((value, known))
        return outputs

    def _call(
        self, step: CallStep, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if self._num_calls < len(self._truth.calls):
            known = self._truth.calls[self._num_calls]
            found = self._view.reads(step.op, args)
            for name, value in known.reads.items():
                self._compare(value, found[name])
            self._view.written(step.op, args).copy_(known.result)
        for made, eagers in self._made:  # in place: readers were compiled for these strides
            made.copy_(eagers.eager.reshape(made.shape))
        self._made.clear()
        self._num_calls += 1

    def _compare(self, known: _Value, value: torch.Tensor) -> None:
        if value.data_ptr() in self._compared:
            return  # it was compared where it was made
        self._compared.add(value.data_ptr())
        noise = (FLOAT32_NOISE if value.dtype is torch.float32 else NOISE) * torch.finfo(value.dtype).eps
        errors = self._errors.setdefault((self._last_piece, known.name), _Errors(noise))
        errors.add(known.exact, known.eager, value.reshape(known.exact.shape))


def _is_compared(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _written_slots(plan: Plan, namespace: Mapping[str, Any]) -> frozenset[str]:
    """Return the slots whose memory a split op writes; what a piece leaves there is not compared."""
    found: set[str] = set()
    for step in plan.split_steps:
        schema = getattr(namespace[step.function], "_schema", None)
        if schema is not None:
            for argument, given in zip(schema.arguments, step.args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    found |= {slot.name for slot in slots_in(given)}
    return frozenset(found)


def _nearest(value: torch.Tensor, candidates: Sequence[_Value]) -> _Value | None:
    """Return the nearest of the traced graph's values, or None where none is near enough."""
    best: tuple[float, _Value] | None = None
    for known in candidates:
        if _without_ones(known.eager.shape) != _without_ones(value.shape):
            continue
        size = float(known.exact.square().mean().sqrt())
        distance = float((value.double().reshape(known.exact.shape) - known.exact).square().mean().sqrt()) / max(
            size, _TINY
        )
        if distance < NEAR and (best is None or distance < best[0]):
            best = distance, known
    return None if best is None else best[1]


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
