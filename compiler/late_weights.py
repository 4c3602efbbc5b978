"""A module that is traced before its weights are there: over fake tensors, whose place real ones take later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from piecegraph.cache.keys import join_path
from piecegraph.compiler.pass_contexts import stored_together
from piecegraph.compiler.stored.model_factors import model_factors
from piecegraph.compiler.trace import BoundInput, Traced
from piecegraph.errors import KeyFactorError

LoadWeights = Callable[[], nn.Module]
"""Gives the module that was traced, its tensors real."""


class NotAsTraced(Exception):
    """What was loaded cannot take the place of what was traced; its words say why."""


@dataclass(frozen=True, slots=True)
class LateWeights:
    """What the module with weights must be like, and how it comes to be."""

    factors: dict[str, Any]  # of the module that is traced, as it is before that
    load: LoadWeights

    @classmethod
    def of(cls, module: nn.Module, load: LoadWeights) -> LateWeights:
        """Raises `KeyFactorError` where it could not be said whether what is loaded is `module`."""
        return cls(model_factors(module), load)

    def module(self) -> nn.Module:
        """With weights. Raises `NotAsTraced`, and what loading raises."""
        module = self.load()
        try:
            factors = model_factors(module)
        except KeyFactorError as error:
            raise NotAsTraced(str(error)) from None
        if factors != self.factors:
            raise NotAsTraced(f"with weights it differs from what was traced in {_where(self.factors, factors)}")
        return module


def with_tensors_of(
    module: nn.Module, traced: Traced, watched: Sequence[BoundInput]
) -> tuple[Traced, list[BoundInput]]:
    """Both with `module`'s parameters and buffers. What was merged is merged in `module` too: parameters become views.

    `watched`: what was bound before passes merged anything. Raises `NotAsTraced` for a constant that has no values,
    with `module` as it was.
    """
    for each in (*watched, *traced.inputs):
        if isinstance(each, BoundInput) and each.kind == "constant" and isinstance(each.tensor, FakeTensor):
            raise NotAsTraced(f"{each.name} comes of weights and became a constant of the trace")
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
        return stored_together([BoundInput.of(module, "parameter", name) for name in bound.members])
    return bound if bound.kind == "constant" else BoundInput.of(module, bound.kind, bound.name)


def _where(expected: Any, found: Any, path: str = "") -> str:
    """The first place two trees of plain data differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in {**expected, **found}:
            if expected.get(name) != found.get(name) or (name in expected) != (name in found):
                return _where(expected.get(name), found.get(name), join_path(path, str(name)))
    return f"{path}: {expected!r}, then {found!r}"
