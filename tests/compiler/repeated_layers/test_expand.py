"""A copied layer equals a traced one, node by node; a layer that may differ from a copy is traced."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from piecegraph.compiler.repeated_layers.find import NAME_ATTRIBUTE, name_layers
from piecegraph.compiler.tracing import trace as tracing
from piecegraph.compiler.tracing.signature import BoundInput
from piecegraph.compiler.tracing.trace import Traced, trace
from piecegraph.errors import CompileError, GraphBreak
from piecegraph.runner.attention.interface.transformers_attention import register_attention
from piecegraph.runner.models.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs
from piecegraph.runner.models.rope import fix_longrope
from tests.runner.tiny_models import FAMILIES, MAX_LEN, UNLISTED, random_model

TIMES = 3
"""Numbers of layers of each kind, by family."""


def nodes(traced: Traced) -> list[tuple[object, ...]]:
    """Describe each node with all its arguments, in which other nodes are numbers."""
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
    """Return the trace with copied layers, and the trace of every layer."""
    with torch.no_grad(), monkeypatch.context() as patch:
        repeated = trace(module, args, {}, dims)
        patch.setattr(tracing, "find_layer_lists", lambda module: ())
        return repeated, trace(module, args, {}, dims)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name == "gpt-oss" else pytest.mark.slow) for name in [*FAMILIES, *UNLISTED]],
)
def test_the_graph_of_a_family_is_the_one_that_tracing_every_layer_gives(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs are the same tensors in the same order; kinds of layers may alternate."""
    config = {**FAMILIES, **UNLISTED}[family]()
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
    assert re.fullmatch(r"\d+ of \d+ layers are copies of one that was traced", repeated.note), repeated.note
    assert not every.note


class Layer(nn.Module):
    """A layer that takes more than a tensor and does not use its name."""

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
    """Return the trace, which equals the trace of every layer. The module is not changed."""
    before = [dict(vars(module)) for module in model.modules()]
    repeated, every = both(model, (torch.randn(3, 8),), {"x": {0: "num_tokens"}}, monkeypatch)
    assert nodes(repeated) == nodes(every)
    assert names(repeated) == names(every)
    assert [dict(vars(module)) for module in model.modules()] == before
    return repeated


def test_a_model_may_return_the_results_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = traced(Model(), monkeypatch)
    assert found.note == "2 of 4 layers are copies of one that was traced"
    assert [kind for kind, _ in found.result_spec.sources] == ["output"] * 4


def test_a_tensor_that_layers_share_stays_one_input(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Model()
    for layer in model.layers:
        layer.linear.weight = model.layers[0].linear.weight
    assert "2 of 4" in traced(model, monkeypatch).note


class Pairs(nn.Module):
    """A layer that returns its result and something else, as a tuple."""

    def __init__(self, place: int, more: object = None) -> None:
        super().__init__()
        self.inner, self.more = Layer(place), more

    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, object]:
        return self.inner(x, pair), x.sin() if self.more == "tensor" else self.more


class OfPairs(Model):
    def call(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: Any = layer(x, (x.sin(), x.cos()))
        return result[0] if isinstance(result, tuple) else result


def test_a_layer_may_return_its_result_in_a_tuple_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced(OfPairs(Pairs), monkeypatch).note == "2 of 4 layers are copies of one that was traced"


class Mixed(nn.Module):
    """Layers in two lists, of which those of one return tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Model(num_layers=3), OfPairs(Pairs, num_layers=3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result: tuple[torch.Tensor, ...] = self.second(self.first(x)[-1])
        return result


@pytest.mark.parametrize(
    "model",
    [OfPairs(functools.partial(Pairs, more="tensor")), OfPairs(functools.partial(Pairs, more=1)), Mixed()],
    ids=["with a tensor", "with a number", "in one of two lists"],
)
def test_layers_that_return_other_tuples_are_traced(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced(model, monkeypatch).note.startswith("every layer was traced: ")


class ByPlace(Layer):
    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, pair, scale) * (2.0 if self.place == 1 else 1.0)


class State:
    """State that outlives a call."""

    number = 0
    tensor: torch.Tensor | None = None


STATE = State()
TABLES: dict[nn.Module, torch.Tensor] = {}


class ReadsOfOthers(Layer):
    """A layer that reads a tensor outside the layer."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        TABLES[self] = torch.full((8,), float(place))

    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, pair, scale) + TABLES[self]


class Narrower(Layer):
    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, pair, scale).double()


class ReadsState(Layer):
    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, pair, scale) * (2.0 if STATE.number in (1, 2) else 1.0)


class Counts(Layer):
    """A layer that keeps a value to be read after all layers ran."""

    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        STATE.number += 1
        return super().forward(x, pair, scale)


class WritesInto(Layer):
    def forward(self, x: torch.Tensor, pair: Any, scale: float = 1.0) -> torch.Tensor:
        pair["result"] = x * 2
        return torch.relu(self.linear(x))


class Checkpoints(Layer):
    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        result: torch.Tensor = torch.utils.checkpoint.checkpoint(super().forward, x, pair, use_reentrant=False)
        return result


OWNER: list[Any] = []


class IsLast(Layer):
    """A layer that depends on its identity and not on its place."""

    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, pair, scale) * (2.0 if OWNER[0].layers[-1] is self else 1.0)


class Pair(Layer):
    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> Any:
        return super().forward(x, pair, scale), x


class Calls(Model):
    """A model whose layers are called by a function."""

    def __init__(self, by: Callable[[int, nn.Module, torch.Tensor], Any], layer: Callable[[int], Any] = Layer) -> None:
        super().__init__(layer)
        self.by = by

    def call(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.by(number, layer, x)
        return result


def with_state(number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    STATE.number = number
    result: torch.Tensor = layer(x, (x.sin(), x.cos()))
    STATE.number = 0
    return result


def counted(number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer(x, (x.sin(), x.cos())) * STATE.number
    if number == 3:
        STATE.number = 0
    return result


def with_dict(number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    given = {"result": x}
    result: torch.Tensor = layer(x, given) + given["result"]
    return result


def in_a_checkpoint(number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    pair = (x.sin(), x.cos())
    result: torch.Tensor = torch.utils.checkpoint.checkpoint(layer, x, pair, use_reentrant=False)
    return result


def twice(number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2 if number == 0 else 1):
        x = layer(x, (x.sin(), x.cos()))
    return x


def one_twice(number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    first = x.sin()
    result: torch.Tensor = layer(x, (first, first if number == 0 else x.cos()))
    return result


def ignored_object(number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer(x, (x.sin(), torch.float32))
    return result


class Ignores(Layer):
    def forward(self, x: torch.Tensor, pair: Any, scale: float = 1.0) -> torch.Tensor:
        return torch.relu(self.linear(x)) * pair[0]


class Weight(nn.Parameter):
    """A parameter class whose instances have an attribute."""


class OfWeights(Layer):
    """A layer whose parameter is of a class with attributes, which differ between layers."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.linear.weight = Weight(self.linear.weight.data)
        self.linear.weight.gain = 2.0 if place == 1 else 1.0  # type: ignore[attr-defined]


class GivesBack(Layer):
    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        return x.add_(pair[0])


def asks_whether_it_is(number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer(x, (x.sin(), x.cos()))
    return y * 1.5 if y is x else y * 3


def with_autocast(number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=number == 1, dtype=torch.bfloat16):
        result: torch.Tensor = layer(x, (x.sin(), x.cos()))
    return result.float()


class Tied(Model):
    """A model whose first and last layers share a bias, which is passed to all layers."""

    def __init__(self) -> None:
        super().__init__()
        first: Any = self.layers[0]
        last: Any = self.layers[3]
        last.linear.bias = first.linear.bias

    def call(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first: Any = self.layers[0]
        result: torch.Tensor = layer(x, (first.linear.bias, x))
        return result


def owned() -> Model:
    OWNER[:] = [Model(IsLast)]
    model: Model = OWNER[0]
    return model


def called(expression: str) -> Callable[[], nn.Module]:
    """Return a maker of models whose layers are called by the expression."""
    namespace: dict[str, Any] = {}
    exec(f"def call(number, layer, x): return {expression}", namespace)
    return lambda: Calls(namespace["call"], Ignores)


TABLE: dict[Any, float] = {}
SPECIAL: list[Any] = []
MARKED: set[Any] = set()


class ReadsOfTable(Layer):
    """A layer whose scale depends on a table that has an entry for one middle layer."""

    def __init__(self, place: int) -> None:
        super().__init__(0)

    def scale(self) -> float:
        raise NotImplementedError

    def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, pair, self.scale())


class ById(ReadsOfTable):
    def scale(self) -> float:
        return TABLE.get(id(self), 1.0)


class ByIdOfWeight(ReadsOfTable):
    def scale(self) -> float:
        return 3.0 if id(self.linear.weight) in TABLE else 1.0


class ByItself(ReadsOfTable):
    def scale(self) -> float:
        return 3.0 if self in MARKED else 1.0


class IsSpecial(ReadsOfTable):
    def scale(self) -> float:
        return 3.0 if SPECIAL[0] is self else 1.0


def marking(kind: type[ReadsOfTable]) -> Callable[[], nn.Module]:
    """Return a maker of models with such layers, in which the third is marked wherever they look."""

    def make() -> Model:
        model = Model(kind)
        layer: Any = model.layers[2]
        TABLE.clear()
        TABLE.update({id(layer): 3.0, id(layer.linear.weight): 3.0})
        SPECIAL[:] = [layer]
        MARKED.clear()
        MARKED.add(layer)
        return model

    return make


OTHERWISE = "is called in another way than layers.0, which is like it"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "it reads its place": (lambda: Model(ByPlace), "reads place, its place among the layers"),
    "it reads what is not in it": (lambda: Model(ReadsOfOthers), "reads a tensor that is not its own"),
    "it returns another dtype": (lambda: Model(Narrower), "returns another kind of tensor than it takes first"),
    "it returns two": (
        lambda: Calls(lambda n, layer, x: layer(x, (x, x))[0], Pair),
        "a layer returns neither a tensor",
    ),
    "it takes an object": (lambda: Calls(ignored_object, Ignores), "neither a tensor nor plain"),
    "it changes what it is given": (lambda: Calls(with_dict, WritesInto), "layers.0 changes what it is given"),
    "it checkpoints": (lambda: Model(Checkpoints), "layers.0 has an op that runs a graph"),
    "it is checkpointed": (lambda: Calls(in_a_checkpoint), "layers.0 runs inside a higher-order op"),
    "it is told apart": (owned, "layers.3 is not what layers.0 is"),
    "state between": (lambda: Calls(with_state, ReadsState), "State.number while it runs"),
    "state that it changes": (lambda: Calls(counted, Counts), "State.number while it runs"),
    "other constants at last": (called("layer(x, (x, 1), scale=1.0 if number < 3 else 0.5)"), OTHERWISE),
    "other constants": (called("layer(x, (x, 1), scale=1.0 if number != 2 else 0.5)"), f"layers.2 {OTHERWISE}"),
    "it gives back": (lambda: Calls(asks_whether_it_is, GivesBack), "returns the very tensor that it takes first"),
    "autocast": (lambda: Calls(with_autocast), OTHERWISE),
    "a tensor of its own": (Tied, "layers.0 is given a tensor of its own"),
    "a list": (called("layer(x, (x, 1) if number < 3 else [x, 1])"), OTHERWISE),
    "other keys": (called("layer(x, {0: x, 1: 2} if number < 3 else {0: x, '1': 2})"), OTHERWISE),
    "one tensor twice": (lambda: Calls(one_twice), OTHERWISE),
    "a table by id": (marking(ById), "TABLE distinguishes layers: it holds layers.2"),
    "a table by id of a weight": (marking(ByIdOfWeight), "layers.2"),
    "a set of layers": (marking(ByItself), "layers.2"),
    "one of them is special": (marking(IsSpecial), "SPECIAL distinguishes layers: it holds layers.2"),
    "it runs twice": (lambda: Calls(twice), "layers.0 runs twice, or inside another"),
    "the first does not run": (
        called("layer(x, (x, 1)) if number else x * 2"),
        "layers.0 or layers.3, which are alike",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_cannot_be_copies_are_all_traced_and_the_note_says_why(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, why = REFUSED[case]
    note = traced(make(), monkeypatch).note
    assert note.startswith("every layer was traced: ")
    assert why in note


def test_layers_that_share_tensors_differently_are_all_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(Layer):
        def __init__(self, place: int) -> None:
            super().__init__(place)
            self.other = nn.Linear(8, 8)
            if place == 0:
                self.other.weight = self.linear.weight

        def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
            return super().forward(self.other(x), pair, scale)

    assert "is shared in another way than" in traced(Model(Two), monkeypatch).note


_library = torch.library.Library("piecegraph_test_layers", "DEF")
_library.define("named(Tensor x, str name) -> Tensor")
torch.library.register_fake("piecegraph_test_layers::named", lambda x, name: torch.empty_like(x), lib=_library)


def handing_on(name: Callable[[Any], str]) -> Model:
    """Return a model whose layers pass what `name` makes of them to an op."""

    class Named(Layer):
        def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
            x = super().forward(x, pair, scale)
            named: torch.Tensor = torch.ops.piecegraph_test_layers.named(x, name(self))
            return named

    model = Model(Named)
    name_layers(model)
    return model


def test_a_copied_layer_passes_its_own_name_to_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    found = traced(handing_on(lambda layer: getattr(layer.linear, NAME_ATTRIBUTE)), monkeypatch)
    assert "2 of 4" in found.note
    given = [node.args[1] for node in found.graph_module.graph.nodes if "named" in str(node.target)]
    assert given == [f"layers.{number}.linear" for number in range(4)]


def test_layers_that_make_text_of_their_name_are_all_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = handing_on(lambda layer: getattr(layer, NAME_ATTRIBUTE) + ".key")
    assert "makes 'layers.0.key' out of its name" in traced(model, monkeypatch).note


def test_an_error_of_the_model_is_the_same_as_without_copies() -> None:
    class Breaks(Layer):
        def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(GraphBreak, match=r"test_expand\.py:\d+"), torch.no_grad():
        trace(Model(Breaks), (torch.randn(3, 8),), {}, {"x": {0: "num_tokens"}})


@pytest.mark.parametrize("num_layers", [3, 6])
def test_two_layers_are_traced_at_any_depth(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator

    traced_code: list[object] = []
    inline = InliningInstructionTranslator.inline_call

    def counted(parent: Any, function: Any, *rest: Any, **how: Any) -> Any:
        traced_code.append(function.get_code())
        return inline(parent, function, *rest, **how)

    monkeypatch.setattr(InliningInstructionTranslator, "inline_call", staticmethod(counted))
    with torch.no_grad():
        trace(Model(num_layers=num_layers), (torch.randn(3, 8),), {}, {"x": {0: "num_tokens"}})
    assert traced_code.count(Layer.forward.__code__) == 2
    assert traced_code.count(Model.call.__code__) == num_layers


def test_attributes_of_parameter_classes_distinguish_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced(Model(OfWeights, 5), monkeypatch).note == "2 of 4 layers are copies of one that was traced"


def test_parameters_that_are_views_stay_views_in_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Model()
    for layer in model.layers:
        memory = torch.randn(128)
        layer.linear.weight = nn.Parameter(memory[64:].view(8, 8))
    found = traced(model, monkeypatch)
    assert "2 of 4" in found.note
    offsets = [
        node.meta["example_value"].storage_offset()
        for node, each in zip(found.graph_module.graph.find_nodes(op="placeholder"), found.inputs, strict=True)
        if isinstance(each, BoundInput) and each.name.endswith("linear.weight")
    ]
    assert offsets == [64] * 4


class Remembers(Model):
    """A model that remembers that it was called."""

    is_first = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.is_first:
            self.is_first = False
            x = x * 2
        return super().forward(x)


def test_a_change_that_outlives_the_call_is_refused_and_not_made() -> None:
    model = Remembers()
    with pytest.raises(CompileError, match=r"changes objects that outlive the call: .*\(is_first\)"), torch.no_grad():
        trace(model, (torch.randn(3, 8),), {}, {"x": {0: "num_tokens"}})
    assert all("forward" not in vars(layer) for layer in model.layers)


def test_other_threads_may_call_a_module_while_it_is_traced() -> None:
    model = Model(num_layers=12)
    x = torch.randn(3, 8)
    with torch.no_grad():
        wanted = model(x)
        tracer = threading.Thread(target=lambda: trace(model, (x,), {}, {"x": {0: "num_tokens"}}))
        tracer.start()
        num_calls = 0
        while tracer.is_alive() or not num_calls:
            assert all(map(torch.equal, model(x), wanted))
            num_calls += 1
        tracer.join()


def test_a_module_that_stands_in_a_list_twice_is_traced_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.layers.extend([model.layers[0], model.layers[3]])
    assert traced(model, monkeypatch).note == ""


def test_a_layer_keeps_its_signature_while_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models inspect the signature to choose arguments."""
    import inspect

    def asks(number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        takes_scale = "scale" in inspect.signature(layer.forward).parameters
        result: torch.Tensor = layer(x, (x.sin(), x.cos())) * (2.0 if takes_scale else 1.0)
        return result

    assert "2 of 4" in traced(Calls(asks), monkeypatch).note
