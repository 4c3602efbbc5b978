"""The facts about a class in a key: everything that its source does not show."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph.compiler.tracing.class_factors import class_facts, function_facts
from tests.compiler.store.small_models import SIZE, compiled


class Scaled(nn.Module):
    """A module that multiplies by `scale()`; each of `MODELS` takes the factor from another place."""

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
def test_a_scalar_is_in_the_key_wherever_it_is_kept(make: Callable[[float], Scaled], whole_cache: Path) -> None:
    """A model of the same name and source with another scalar is not taken from the cache."""
    x = torch.rand(2, SIZE)
    for state in ("miss", "hit"):
        for scale in (1.5, 2.5):
            module = make(scale)
            model = compiled(module)
            assert (model.report().cache.state, model.report().cache.not_stored) == (state, "")
            torch.testing.assert_close(model(x), module(x))


def test_a_replaced_method_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for a library's class too, whose other facts are plain attributes only."""
    before = class_facts(nn.Linear)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    after = class_facts(nn.Linear)
    assert set(after) - set(before) == {"forward"}
    assert after["forward"][1].startswith(f"{__name__}.test_a_replaced_method_is_in_the_key")


class Mode(enum.Enum):
    FAST = 1


class Odd:
    """A class with attributes of every kind; those of other kinds are described by their class alone."""

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


def test_facts_of_a_class() -> None:
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


def test_a_function_that_closes_over_itself_has_facts() -> None:
    def outer() -> Any:
        return inner()

    def inner() -> Any:
        return outer()

    assert isinstance(outer, types.FunctionType)
    facts = function_facts(outer)
    ((name, _, _, closure, *_),) = facts[3]
    assert (name, closure) == ("function", [["function around this", 0]])


def test_what_transformers_remembers_of_a_class_is_no_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changing the attention of one model sets it, and plans of all models of that class would be lost."""
    from transformers import LlamaForCausalLM

    before = class_facts(LlamaForCausalLM)
    monkeypatch.setattr(LlamaForCausalLM, "_can_set_attn_implementation_cached_value", True, raising=False)
    assert class_facts(LlamaForCausalLM) == before
    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", "other")
    assert class_facts(LlamaForCausalLM) != before
