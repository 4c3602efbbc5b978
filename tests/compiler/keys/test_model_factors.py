"""The facts about a module in a key: every attribute that a trace may read, and no value of a weight."""

from __future__ import annotations

import functools
import logging
import operator
import random
import re
import threading
from abc import ABC
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from piecegraph.cache.store.keys import key_of
from piecegraph.compiler.keys.model_factors import EXCLUDED, MAX_TENSOR_BYTES, model_factors
from piecegraph.errors import KeyFactorError
from tests.compiler.store.small_models import Small, compiled
from tests.runner.tiny_models import llama_config, make_config, random_model

T = TypeVar("T")


def key(module: nn.Module) -> str:
    return key_of({"model": model_factors(module)})


@dataclass
class Options:
    eps: float = 1e-5


@dataclass
class PerLayer:
    """As transformers' configs in which each layer has a head size of its own."""

    head_dim: int

    def __getattribute__(self, name: str) -> Any:
        if name == "head_dim":
            raise RuntimeError("which layer's?")
        return super().__getattribute__(name)


class Named(NamedTuple):
    x: int


class Slotted:
    __slots__ = ("x",)


def scaled(by: float) -> Callable[[float], float]:
    return lambda x: x * by


def named_alike(value: int) -> type:
    return type("Alike", (), {"value": value})


def with_attribute(value: Any) -> Small:
    """Return a model in which one nested layer has the attribute."""
    model = Small()
    model.layers[1].extra = value
    return model


PAIRS: tuple[tuple[Any, Any], ...] = (
    (1e-5, 1e-6),
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    ("a", "b"),
    (None, 0),
    ([1, 2], [2, 1]),
    ({"a": 1}, {"a": 2}),
    ({1, 2}, {1, 3}),
    (Named(1), Named(2)),
    (Named(1), (1,)),
    (torch.float16, torch.bfloat16),
    (torch.tensor([1.0]), torch.tensor([2.0])),
    (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
    (Options(1e-5), Options(1e-6)),
    (SimpleNamespace(window=4), SimpleNamespace(window=5)),
    (SimpleNamespace(inner=SimpleNamespace(x=1)), SimpleNamespace(inner=SimpleNamespace(x=2))),
    (scaled(2.0), scaled(3.0)),
    (functools.partial(max, 1), functools.partial(max, 2)),
    (torch.relu, torch.sigmoid),
    (nn.ReLU, nn.GELU),
    (lambda x: x + 1, lambda x: x + 2),
    (re.compile("a"), re.compile("b")),
    (re.compile("a"), re.compile("a", re.IGNORECASE)),
    (logging.getLogger("a"), logging.getLogger("b")),
    ({"a": 1}.get, {"a": 2}.get),
    (named_alike(1), named_alike(2)),
    ([named_alike(1), named_alike(2)], [named_alike(2), named_alike(1)]),
)


@pytest.mark.parametrize(("left", "right"), PAIRS, ids=lambda value: re.sub(r" at 0x\w+", "", repr(value))[:24])
def test_attributes_that_differ_make_keys_that_differ(left: Any, right: Any) -> None:
    assert key(with_attribute(left)) != key(with_attribute(right))
    assert key(with_attribute(left)) == key(with_attribute(left))
    assert key(with_attribute(left)) != key(Small())


@pytest.mark.parametrize(
    "value",
    [
        *(Slotted(), torch.Generator(), iter([1]), float("nan"), torch.zeros(MAX_TENSOR_BYTES), [nn.ReLU()]),
        *(operator.itemgetter(0), array("f", [1.0]), random.Random(0), torch._C.Graph()),  # their state is in C
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_attribute_of_which_no_key_can_be_made_is_named(value: Any) -> None:
    with pytest.raises(KeyFactorError):
        key(with_attribute(value))
    if not isinstance(value, float | list):
        with pytest.raises(KeyFactorError, match=r"layers\.1\.extra is a "):
            key(with_attribute(value))


def test_an_attribute_that_contains_itself_has_no_key() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(KeyFactorError, match="or below it contains itself"):
        key(with_attribute(loop))


def test_locks_and_empty_slots_are_accepted() -> None:
    class Bare(Generic[T], ABC):
        def __init__(self, value: int) -> None:
            self.value = value

    assert key(with_attribute(threading.Lock())) == key(with_attribute(threading.Lock()))
    assert key(with_attribute(Bare(1))) != key(with_attribute(Bare(2)))


def changed(change: Callable[[Any], object]) -> Small:
    model = Small()
    change(model)
    return model


def hook(module: nn.Module, args: Any) -> None:
    return None


CHANGES: dict[str, Callable[[Any], object]] = {
    "depth": lambda m: m.layers.append(m.layers[0].__class__(1.0)),
    "training": lambda m: m.layers[1].eval(),
    "hook": lambda m: m.layers[0].register_forward_pre_hook(hook),
    "dtype": lambda m: m.layers[0].linear.to(torch.float64),
    "size": lambda m: setattr(m.layers[0], "linear", nn.Linear(8, 8)),
    "no bias": lambda m: setattr(m.layers[0].linear, "bias", None),
    "tied": lambda m: setattr(m.layers[0].linear, "weight", m.layers[1].linear.weight),
    "strides": lambda m: setattr(m.layers[0].linear.weight, "data", m.layers[0].linear.weight.data.t()),
    "a view": lambda m: setattr(m.layers[0].linear.weight, "data", torch.zeros(8, 4)[2:6]),
    "needs no gradient": lambda m: m.layers[0].linear.weight.requires_grad_(False),
    "a buffer": lambda m: m.register_buffer("table", torch.zeros(1)),
    "another class": lambda m: setattr(m.layers[0], "linear", nn.Identity()),
    "forward": lambda m: setattr(m.layers[0], "forward", lambda x: x),
}


@pytest.mark.parametrize("name", CHANGES)
def test_structure_is_in_the_key(name: str) -> None:
    assert key(changed(CHANGES[name])) != key(Small())


def test_class_attributes_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(Small())
    monkeypatch.setattr(Small, "eps", 1e-5, raising=False)
    with_eps = key(Small())
    monkeypatch.setattr(Small, "eps", 1e-6)
    assert len({before, with_eps, key(Small())}) == 3


def test_values_of_weights_are_not_in_the_key() -> None:
    assert key(Small(seed=0)) == key(Small(seed=1))


def test_a_fake_weight_stands_for_a_real_one() -> None:
    with FakeTensorMode():
        fake = Small()
    assert key(fake) == key(Small())
    assert key(Small().double()) != key(fake)


def test_a_tensor_without_strides_has_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model compiles and is not stored: nothing is wrong with the model."""
    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for layout, tensor in (("torch.sparse_coo", torch.eye(2).to_sparse()), ("nested", nested)):
        with pytest.raises(KeyFactorError, match=f"extra is a tensor of layout {layout}, of which no key"):
            key(with_attribute(tensor))
        model = Small()
        model.register_buffer("mask", tensor)
        with pytest.raises(KeyFactorError, match=f"buffer mask is a tensor of layout {layout}, of which no key"):
            key(model)
        report = compiled(model, cache_dir=str(tmp_path), cache=True).report()
        assert "buffer mask is a tensor of layout" in report.cache.not_stored


def test_a_tensor_whose_values_cannot_be_read_has_no_key() -> None:
    class Masked(torch.Tensor):
        """A tensor whose values cannot be read."""

        def numpy(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("not mine to give")

    with pytest.raises(KeyFactorError, match=r"extra is a .*Masked whose values cannot be read: not mine to give"):
        key(with_attribute(torch.ones(2).as_subclass(Masked)))
    with FakeTensorMode():
        fake = torch.ones(2)
    with pytest.raises(KeyFactorError, match="extra is a tensor of 8 bytes that is neither a parameter nor a buffer"):
        key(with_attribute(fake))


def test_layers_are_one_row() -> None:
    """People read entries: values that differ are listed by number, equal values are written once."""
    factors = model_factors(with_attribute(5))
    row = factors["modules"]["layers.*"]
    assert row["at"] == "0 1"
    assert row["each"] == {".extra": {"1": 5}}
    assert row["all"][".scale"] == 1.0
    assert len(str(model_factors(Small(40)))) < 2 * len(str(model_factors(Small(2))))


EXCLUDED_NAME = "name_or_path"

MODELS: dict[str, tuple[Any, Any]] = {
    "rms eps": (llama_config(rms_norm_eps=1e-5), llama_config(rms_norm_eps=1e-6)),
    "rope theta": (
        llama_config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        llama_config(rope_parameters={"rope_type": "default", "rope_theta": 10001.0}),
    ),
    "window": (make_config("MistralConfig", sliding_window=8), make_config("MistralConfig", sliding_window=9)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_differ_in_a_scalar_share_no_plan(name: str) -> None:
    left, right = (random_model(config) for config in MODELS[name])
    assert key(left) != key(right)
    assert key(left) == key(random_model(MODELS[name][0], seed=1))


def test_where_a_model_was_read_from_makes_no_difference() -> None:
    """`EXCLUDED` applies to transformers' own classes only."""
    left, right = (random_model(llama_config()) for _ in range(2))
    for name in EXCLUDED:
        setattr(right, name, "/somewhere/else")
        setattr(right.config, name, "/somewhere/else")
    assert key(left) == key(right)
    small = Small()
    setattr(small, EXCLUDED_NAME, "/here")
    assert key(small) != key(Small())


def test_a_function_registered_for_attention_is_in_the_key() -> None:
    from transformers import AttentionInterface

    def once(*args: Any, **kwargs: Any) -> Any:
        return args

    def twice(*args: Any, **kwargs: Any) -> Any:
        return args, args

    keys = []
    model = random_model(llama_config())
    for function in (once, twice):
        AttentionInterface.register("of_this_test", function)
        model.config._attn_implementation_internal = "of_this_test"
        keys.append(key(model))
    assert keys[0] != keys[1]


def test_a_field_that_refuses_to_be_read_is_in_the_key() -> None:
    """What the object holds counts, not what its attribute says."""
    first, second = nn.Module(), nn.Module()
    first.config, second.config = PerLayer(8), PerLayer(16)  # type: ignore[assignment]
    assert key(first) != key(second)
