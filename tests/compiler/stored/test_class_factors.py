"""What a key knows of a class: what its source does not say."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph.compiler.stored.class_factors import class_facts, function_facts
from tests.compiler.stored.small_models import SIZE, compiled


class Scaled(nn.Module):
    """Multiplies by what `scale` gives; each of `MODELS` has it from somewhere else."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(SIZE, SIZE)
        vars(self).update(attributes)

    def scale(self) -> float:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = torch.addmm(self.linear.bias, x, self.linear.weight, alpha=self.scale())
        result: torch.Tensor = torch.ops.pgtoy.triple.default(scaled)
        return result


def of_a_closure(scale: float) -> Scaled:
    class Local(Scaled):
        def scale(self) -> float:
            return scale

    return Local()


def of_a_container(value: float) -> Scaled:
    class Local(Scaled):
        scales = (0.0, {"scale": value})

        def scale(self) -> float:
            found = self.scales[1]
            assert isinstance(found, dict)
            return found["scale"]

    return Local()


def of_a_property(value: float) -> Scaled:
    class Local(Scaled):
        @property
        def value(self) -> float:
            return value

        def scale(self) -> float:
            return self.value

    return Local()


def of_a_class_it_holds(scale: float) -> Scaled:
    class Settings:
        value = scale

    class Local(Scaled):
        settings: type[Settings]

        def scale(self) -> float:
            return self.settings.value

    return Local(settings=Settings)


class WithGet(Scaled):
    get: Callable[[str], float]

    def scale(self) -> float:
        return self.get("scale")


class WithFunction(Scaled):
    function: Any

    def scale(self) -> float:
        return float(self.function.value)


def of_a_bound_method(scale: float) -> Scaled:
    return WithGet(get={"scale": scale}.get)


def of_an_attribute_of_a_function(scale: float) -> Scaled:
    def function() -> float:
        return function.value  # type: ignore[attr-defined]

    function.value = scale  # type: ignore[attr-defined]
    return WithFunction(function=function)


MODELS = (
    of_a_closure,
    of_a_container,
    of_a_property,
    of_a_class_it_holds,
    of_a_bound_method,
    of_an_attribute_of_a_function,
)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_scalar_counts_wherever_it_is(make: Callable[[float], Scaled], whole_cache: Path) -> None:
    """A model of the same name and source that was compiled before computes something else."""
    x = torch.rand(2, SIZE)
    for state in ("miss", "hit"):
        for scale in (1.5, 2.5):
            module = make(scale)
            model = compiled(module)
            assert (model.report().cache.state, model.report().cache.not_stored) == (state, "")
            torch.testing.assert_close(model(x), module(x))


def test_a_function_put_in_anothers_place_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a library's class too, of which nothing else is told but plain attributes."""
    before = class_facts(nn.Linear)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    after = class_facts(nn.Linear)
    assert set(after) - set(before) == {"forward"}
    assert after["forward"][1].startswith(f"{__name__}.test_a_function_put_in_anothers_place_counts")


class Mode(enum.Enum):
    FAST = 1


class Odd:
    """What cannot be told is told by its class."""

    mode = Mode.FAST
    dtype = torch.float16
    names = frozenset({"b", "a"})
    inner = nn.ReLU
    home = enum
    nan = float("nan")
    thing = object()

    @staticmethod
    def static() -> int:
        return 1

    @classmethod
    def of_class(cls) -> int:
        return 2


def test_what_is_told_of_a_class() -> None:
    found = class_facts(Odd)
    assert {name: fact for name, fact in found.items() if not isinstance(fact, list)} == {
        "mode": {"$enum": [f"{__name__}.Mode", "FAST"]},
        "dtype": "torch.float16",
        "inner": "class torch.nn.modules.activation.ReLU",
        "home": "module enum",
        "nan": "a builtins.float",
        "thing": "a builtins.object",
    }
    assert found["names"] == ["a", "b"]
    assert [found[name][1] for name in ("static", "of_class")] == [f"{__name__}.Odd.static", f"{__name__}.Odd.of_class"]


def test_a_function_that_holds_itself_is_told() -> None:
    def outer() -> Any:
        return inner()

    def inner() -> Any:
        return outer()

    assert isinstance(outer, types.FunctionType)
    facts = function_facts(outer)
    ((name, _, _, closure, *_),) = facts[3]
    assert (name, closure) == ("function", [["function around this", 0]])
