"""A layer that is a copy of one like it is, node by node, what tracing it gives; what cannot be a copy is traced."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from piecegraph.compiler import trace as tracing
from piecegraph.compiler.layer_names import NAME_ATTRIBUTE, name_layers
from piecegraph.compiler.trace import BoundInput, Traced, trace
from piecegraph.errors import GraphBreak
from piecegraph.runner.attention.transformers_attention import register_attention
from piecegraph.runner.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.rope import fix_longrope
from tests.runner.tiny_models import FAMILIES, MAX_LEN, random_model

TIMES = 3
"""As many layers of each kind as a family's config has."""


def nodes(traced: Traced) -> list[tuple[object, ...]]:
    """Each with all it is made of, others by number. A message of Dynamo's names another node of its own."""
    number: dict[fx.Node, int] = {}
    found: list[tuple[object, ...]] = []
    for node in traced.graph_module.graph.nodes:
        number[node] = len(number)
        arguments = map_aggregate(
            (node.args, node.kwargs), lambda each: f"%{number[each]}" if isinstance(each, fx.Node) else each
        )
        target = "" if node.op == "placeholder" else str(node.target)
        where = node.meta.get("stack_trace")
        found.append((node.op, target, re.sub(r"node '\w+'", "", str(arguments)), value(node), where))
    return found


def value(node: fx.Node) -> object:
    def plain(each: Any) -> object:
        return (each.shape, each.dtype, each.stride()) if isinstance(each, torch.Tensor) else each

    return str(torch.utils._pytree.tree_map(plain, node.meta.get("example_value")))


def names(traced: Traced) -> list[object]:
    return [(each.name, each.kind) if isinstance(each, BoundInput) else each for each in traced.inputs]


def tensors(traced: Traced) -> list[torch.Tensor]:
    return [each.tensor for each in traced.inputs if isinstance(each, BoundInput)]


def both(
    module: nn.Module, args: tuple[Any, ...], dims: dict[str, dict[int, str]], monkeypatch: pytest.MonkeyPatch
) -> tuple[Traced, Traced]:
    """As it is traced, and with every layer traced."""
    with torch.no_grad(), monkeypatch.context() as patch:
        repeated = trace(module, args, {}, dims)
        patch.setattr(tracing, "lists_of_layers", lambda module: ())
        return repeated, trace(module, args, {}, dims)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_graph_of_a_family_is_the_one_that_tracing_every_layer_gives(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the tensors its inputs are, in order; kinds of layers may alternate."""
    config = FAMILIES[family]()
    for name, each in config.to_dict().items():
        if isinstance(each, list) and len(each) == config.num_hidden_layers:
            setattr(config, name, each * TIMES)
    config.num_hidden_layers *= TIMES
    register_attention()
    model: Any = random_model(config)
    model.set_attn_implementation("piecegraph")
    fix_longrope(model, MAX_LEN)
    name_layers(model)
    module = CausalLMForward(model)
    repeated, every = both(module, example_inputs(torch.device("cpu")), DYNAMIC_DIMS, monkeypatch)
    assert nodes(repeated) == nodes(every)
    assert names(repeated) == names(every)
    assert list(map(id, tensors(repeated))) == list(map(id, tensors(every)))
    assert re.fullmatch(r"\d+ of \d+ layers are traced as others were", repeated.note), repeated.note
    assert not every.note


class Layer(nn.Module):
    """Takes more than a tensor, and hands its name to nobody."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.linear = nn.Linear(8, 8)
        self.table: nn.Parameter | None = None

    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        return torch.relu(self.linear(x)) * pair[0] * scale + pair[1]


class Model(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module] = Layer, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(layer, range(num_layers)))

    def call(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(x, (x.sin(), x.cos()))
        return result

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        between = []
        for number, layer in enumerate(self.layers):
            x = self.call(number, layer, x)
            between.append(x)
        return tuple(between)


def traced(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Traced:
    """As it is, and the same as with every layer traced. The module is left as it was."""
    before = [dict(vars(module)) for module in model.modules()]
    repeated, every = both(model, (torch.randn(3, 8),), {"x": {0: "num_tokens"}}, monkeypatch)
    assert nodes(repeated) == nodes(every)
    assert names(repeated) == names(every)
    assert [dict(vars(module)) for module in model.modules()] == before
    return repeated


def test_what_layers_return_may_all_be_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    found = traced(Model(), monkeypatch)
    assert found.note == "3 of 4 layers are traced as others were"
    assert [kind for kind, _ in found.result_spec.sources] == ["output"] * 4


def test_a_tensor_that_layers_share_stays_one_input(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Model()
    for layer in model.layers:
        layer.linear.weight = model.layers[0].linear.weight
    assert "3 of 4" in traced(model, monkeypatch).note


class ByPlace(Layer):
    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, pair, scale) * (2.0 if self.place > 1 else 1.0)


TABLES: dict[nn.Module, torch.Tensor] = {}


class ReadsOfOthers(Layer):
    """A table of its own that is not in it."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        TABLES[self] = torch.full((8,), float(place))

    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, pair, scale) + TABLES[self]


class Narrower(Layer):
    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, pair, scale).double()


class Pair(Layer):
    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> Any:
        return super().forward(x, pair, scale), x


class TakesPairs(Model):
    def call(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(x, (x.sin(), x.cos()))[0]
        return result


class ScalesLater(Model):
    def call(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(x, (x.sin(), x.cos()), scale=1.0 if number < 2 else 0.5)
        return result


class TakesOneTwice(Model):
    def call(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first = x.sin()
        result: torch.Tensor = layer(x, (first, first if number == 0 else x.cos()))
        return result


class TakesAnObject(Model):
    def call(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(x, (x.sin(), x.cos()), unused=torch.float32)
        return result


class Ignores(Layer):
    def forward(self, x: torch.Tensor, pair: Any, scale: float = 1.0, unused: object = None) -> torch.Tensor:
        return super().forward(x, pair, scale)


class RunsTwice(Model):
    def call(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2 if number == 0 else 1):
            x = layer(x, (x.sin(), x.cos()))
        return x


class LeavesOutTheFirst(Model):
    def call(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return super().call(number, layer, x) if number else x * 2


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "it reads its place": (lambda: Model(ByPlace), "layers.0 reads place, its place among the layers"),
    "it reads what is not in it": (lambda: Model(ReadsOfOthers), "reads a tensor that is not its own"),
    "it returns another dtype": (lambda: Model(Narrower, 2), "returns another kind of tensor than it takes first"),
    "it returns two": (lambda: TakesPairs(Pair), "TorchRuntimeError"),
    "it takes an object": (lambda: TakesAnObject(Ignores), "neither a tensor nor plain"),
    "other constants": (ScalesLater, "layers.2 is called in another way than layers.0, which is like it"),
    "one tensor twice": (TakesOneTwice, "layers.0 takes one tensor twice, where layers.1 takes two"),
    "it runs twice": (RunsTwice, "layers.0 runs twice, or inside another"),
    "the first does not run": (LeavesOutTheFirst, "layers.1 runs before layers.0, which is like it, or without it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_cannot_be_copies_are_traced_each_and_the_reason_is_told(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, why = REFUSED[case]
    note = traced(make(), monkeypatch).note
    assert note.startswith("every layer was traced: ")
    assert why in note


def test_tensors_shared_in_another_way_are_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(Layer):
        def __init__(self, place: int) -> None:
            super().__init__(place)
            self.other = nn.Linear(8, 8)
            if place == 0:
                self.other.weight = self.linear.weight

        def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
            return super().forward(self.other(x), pair, scale)

    assert "is shared in another way than" in traced(Model(Two), monkeypatch).note


def test_names_that_layers_hand_to_ops_are_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    library = torch.library.Library("piecegraph_test_names", "DEF")
    library.define("named(Tensor x, str name) -> Tensor")
    torch.library.register_fake("piecegraph_test_names::named", lambda x, name: torch.empty_like(x), lib=library)

    class Named(Layer):
        def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
            x = super().forward(x, pair, scale)
            named: torch.Tensor = torch.ops.piecegraph_test_names.named(x, getattr(self.linear, NAME_ATTRIBUTE))
            return named

    model = Model(Named)
    name_layers(model)
    found = traced(model, monkeypatch)
    assert "3 of 4" in found.note
    given = [node.args[1] for node in found.graph_module.graph.nodes if "named" in str(node.target)]
    assert given == [f"layers.{number}.linear" for number in range(4)]


def test_an_error_of_the_model_is_the_one_that_it_is_without_copies() -> None:
    class Breaks(Layer):
        def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(GraphBreak, match=r"test_repeated_layers\.py:\d+"), torch.no_grad():
        trace(Model(Breaks), (torch.randn(3, 8),), {}, {"x": {0: "num_tokens"}})


@pytest.mark.parametrize("num_layers", [2, 6])
def test_a_layer_is_traced_once_at_any_depth(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator

    traced_code: list[object] = []
    inline = InliningInstructionTranslator.inline_call

    def counted(parent: Any, function: Any, *rest: Any, **how: Any) -> Any:
        traced_code.append(function.get_code())
        return inline(parent, function, *rest, **how)

    monkeypatch.setattr(InliningInstructionTranslator, "inline_call", staticmethod(counted))
    with torch.no_grad():
        trace(Model(num_layers=num_layers), (torch.randn(3, 8),), {}, {"x": {0: "num_tokens"}})
    assert traced_code.count(Layer.forward.__code__) == 1
    assert traced_code.count(Model.call.__code__) == num_layers
