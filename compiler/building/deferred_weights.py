"""Modules that are traced over fake tensors before their weights are loaded, and receive real tensors later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from piecegraph.cache.store.keys import join_path
from piecegraph.compiler.keys.model_factors import model_factors
from piecegraph.compiler.rewriting.pass_contexts import store_together
from piecegraph.compiler.torch_compat.fake_tensors import FakeTensor
from piecegraph.compiler.tracing.signature import BoundInput
from piecegraph.compiler.tracing.trace import Traced
from piecegraph.errors import KeyFactorError

LoadWeights = Callable[[], nn.Module]
"""Returns the traced module with real tensors."""


class TracedModelMismatch(Exception):
    """The loaded module differs from the traced one; the message says where."""


@dataclass(frozen=True, slots=True)
class DeferredWeights:
    """A function that loads a module's weights, and the factors that the loaded module must have."""

    factors: dict[str, Any]  # of the module before it is traced
    load: LoadWeights

    @classmethod
    def of(cls, module: nn.Module, load: LoadWeights) -> DeferredWeights:
        """Compute the factors of `module`. Raises `KeyFactorError` where they cannot identify the module."""
        return cls(model_factors(module), load)

    def module(self) -> nn.Module:
        """Load and return the module with weights. Raises `TracedModelMismatch`, and what loading raises."""
        module = self.load()
        try:
            factors = model_factors(module)
        except KeyFactorError as error:
            raise TracedModelMismatch(str(error)) from None
        if factors != self.factors:
            raise TracedModelMismatch(
                f"the loaded module differs from the traced module in {_where(self.factors, factors)}"
            )
        return module


def with_tensors_of(
    module: nn.Module, traced: Traced, watched: Sequence[BoundInput]
) -> tuple[Traced, list[BoundInput]]:
    """Return `traced` and `watched` with the parameters and buffers of `module` in place of fake tensors.

    `watched` holds the inputs that were bound before passes merged any. Parameters that a pass merged are merged in
    `module` too: they become views of one tensor. Raises `TracedModelMismatch`, with `module` unchanged, for a constant
    without values.
    """
    for each in (*watched, *traced.inputs):
        if isinstance(each, BoundInput) and each.kind == "constant" and isinstance(each.tensor, FakeTensor):
            raise TracedModelMismatch(f"{each.name} is computed from weights and became a constant of the trace")
    real = {id(each.tensor): _real(each, module) for each in watched}
    for each in traced.inputs:
        if isinstance(each, BoundInput) and id(each.tensor) not in real:
            real[id(each.tensor)] = _real(each, module)
    sources = tuple(
        (kind, real[id(what)].tensor if kind == "bound" else what) for kind, what in traced.result_spec.sources
    )
    inputs = tuple(real[id(each.tensor)] if isinstance(each, BoundInput) else each for each in traced.inputs)
    spec = replace(traced.result_spec, sources=sources)
    return replace(traced, inputs=inputs, result_spec=spec), [real[id(each.tensor)] for each in watched]


def _real(bound: BoundInput, module: nn.Module) -> BoundInput:
    if bound.kind == "merged":
        return store_together([BoundInput.of(module, "parameter", name) for name in bound.members])
    return bound if bound.kind == "constant" else BoundInput.of(module, bound.kind, bound.name)


def _where(expected: Any, found: Any, path: str = "") -> str:
    """Return the first place where two trees of plain data differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in {**expected, **found}:
            if expected.get(name) != found.get(name) or (name in expected) != (name in found):
                return _where(expected.get(name), found.get(name), join_path(path, str(name)))
    return f"{path}: {expected!r}, then {found!r}"
