"""Layers that are alike are traced once: the others are copies of the first, over tensors of their own.

While a model is traced, the first layer of a kind says in the graph where it begins and ends, and each other one is a
single node. Afterwards that node becomes a copy of what lies between. What cannot be copied, or was traced by looking
at what differs between layers, is `NotRepeatable`: then every layer has to be traced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from piecegraph.compiler.alike_layers import Layer, LayerList
from piecegraph.compiler.layer_names import NAME_ATTRIBUTE

_library = torch.library.Library("piecegraph", "FRAGMENT")
for _name in ("layer_begins", "layer_ends", "layer_again"):
    _library.define(f"{_name}(Tensor x, Tensor[] tensors, str layer, str how) -> Tensor")
    torch.library.register_fake(
        f"piecegraph::{_name}", lambda x, *_: x.new_empty_strided(x.shape, x.stride()), lib=_library
    )

_BEGINS: Any = torch.ops.piecegraph.layer_begins.default
_ENDS: Any = torch.ops.piecegraph.layer_ends.default
_AGAIN: Any = torch.ops.piecegraph.layer_again.default
"""`x`: what a layer takes first, or what it returns; `tensors`: all that it takes; `how`: where those stand, and what
it takes besides."""

_UNKNOWN = "?"
"""Stands in `how` for what is neither a tensor nor plain."""

_OUR_FRAME = re.compile(rf'^  File "{re.escape(__file__)}", .*\n(?:    .*\n)*', re.MULTILINE)
"""Of a stack trace, what only a mark put there."""


class NotRepeatable(Exception):
    """Layers that look alike cannot be copies of each other; its words say why."""


@contextmanager
def traced_once(lists: Sequence[LayerList]) -> Iterator[None]:
    """What is traced inside this block has marks in place of all layers but the first of each kind."""
    changed: list[nn.Module] = []
    try:
        for kind in (kind for each in lists for kind in each.kinds if kind.others):
            for layer in (kind.first, *kind.others):
                forward = _first(type(layer.module), layer.name) if layer is kind.first else _again(layer.name)
                vars(layer.module)["forward"] = MethodType(forward, layer.module)
                changed.append(layer.module)
        yield
    finally:
        for module in changed:
            del vars(module)["forward"]


def _first(real: Any, name: str) -> Callable[..., Any]:
    def forward(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tensors, how = _taken_apart(x, args, kwargs)
        begun = torch.ops.piecegraph.layer_begins.default(x, tensors, name, how)
        out = real.forward(self, begun, *args, **kwargs)
        return torch.ops.piecegraph.layer_ends.default(out, [], name, "")

    return forward


def _again(name: str) -> Callable[..., Any]:
    def forward(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tensors, how = _taken_apart(x, args, kwargs)
        return torch.ops.piecegraph.layer_again.default(x, tensors, name, how)

    return forward


def _taken_apart(*arguments: Any) -> tuple[list[torch.Tensor], str]:
    """The tensors of a layer's arguments, and the rest of them as text. It is traced, so it is plain."""
    tensors: list[torch.Tensor] = []
    how: list[str] = []
    _take_apart(arguments, tensors, how)
    return tensors, " ".join(how)


def _take_apart(value: Any, tensors: list[torch.Tensor], how: list[str]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        how.append("tensor")
    elif isinstance(value, (tuple, list)):
        how.append("(")
        for item in value:
            _take_apart(item, tensors, how)
        how.append(")")
    elif isinstance(value, dict):
        for key in value:
            how.append(f"{key}=")
            _take_apart(value[key], tensors, how)
    elif value is None or isinstance(value, (bool, int, float, str)):
        how.append(f"{value!r}")
    else:
        how.append(_UNKNOWN)


def repeat(graph: fx.Graph, examples: Sequence[Any], lists: Sequence[LayerList]) -> tuple[Any, ...]:
    """Put copies of layers, over tensors of their own, where `graph` has marks, and take all marks out.

    `examples`: one a placeholder, of a parameter or buffer itself; returned with those of new placeholders. Raises
    `NotRepeatable`, and then the graph is of no use.
    """
    inputs = _Inputs(graph, examples)
    regions = _regions(graph)
    for each in lists:
        for layer, first in each.layers:
            if layer is first:
                inputs.pass_by(layer)
                continue
            for again in [node for node in graph.nodes if node.target is _AGAIN and _said(node).layer == layer.name]:
                if first.name not in regions:
                    raise NotRepeatable(f"{layer.name} runs before {first.name}, which is like it, or without it")
                _copy(graph, regions[first.name], again, inputs.of_copy(first, layer), _names(first, layer))
    for region in regions.values():
        for mark in (region.begin, region.end):
            mark.replace_all_uses_with(_said(mark).x)
            graph.erase_node(mark)
    for node in graph.nodes:
        if "stack_trace" in node.meta:
            node.meta["stack_trace"] = _OUR_FRAME.sub("", node.meta["stack_trace"])
    return inputs.examples()


class _Inputs:
    """A graph's placeholders, to which those of copies are added: after what the layer before them has."""

    def __init__(self, graph: fx.Graph, examples: Sequence[Any]) -> None:
        self._graph = graph
        self._placeholders = list(graph.find_nodes(op="placeholder"))
        self._example = dict(zip(self._placeholders, examples, strict=True))
        self._of_tensor = {id(each): node for node, each in self._example.items() if isinstance(each, torch.Tensor)}
        self._last: fx.Node | None = None

    def examples(self) -> tuple[Any, ...]:
        return tuple(self._example[node] for node in self._placeholders)

    def pass_by(self, layer: Layer) -> None:
        """New placeholders come after this layer's, from now on."""
        own = [self._of_tensor[key] for key in map(id, _tensors(layer).values()) if key in self._of_tensor]
        self._last = max([*own, *filter(None, [self._last])], key=self._placeholders.index, default=None)

    def of_copy(self, first: Layer, layer: Layer) -> dict[fx.Node, fx.Node]:
        """For each placeholder that is a tensor of `first`, the one that is the same tensor of `layer`."""
        found: dict[fx.Node, fx.Node] = {}
        ours, theirs = _tensors(first), _tensors(layer)
        paths = {id(tensor): path for path, tensor in reversed(ours.items())}
        for node in [each for each in self._placeholders if id(self._example[each]) in paths]:
            tensor = theirs[paths[id(self._example[node])]]
            if id(tensor) not in self._of_tensor:
                self._add(node, tensor, first, layer)
            found[node] = self._of_tensor[id(tensor)]
        for path, tensor in ours.items():
            node = self._of_tensor.get(id(tensor))
            if node is not None and found[node] is not self._of_tensor.get(id(theirs[path])):
                raise NotRepeatable(f"{first.name}.{path} is shared in another way than {layer.name}.{path}")
        return found

    def _add(self, like: fx.Node, tensor: torch.Tensor, first: Layer, layer: Layer) -> None:
        assert self._last is not None, "a placeholder of the first layer is passed by before"
        was, becomes = (each.name.replace(".", "_modules_") for each in (first, layer))
        with self._graph.inserting_after(self._last):
            made = self._graph.placeholder(str(like.target).replace(was, becomes))
        fake = like.meta["example_value"]
        made.meta = {**like.meta, "example_value": fake.new_empty_strided(fake.shape, fake.stride())}
        self._placeholders.insert(self._placeholders.index(self._last) + 1, made)
        self._example[made] = tensor
        self._of_tensor[id(tensor)] = self._last = made


def _tensors(layer: Layer) -> dict[str, torch.Tensor]:
    """Its parameters and buffers by name in it, each under all its names."""
    module = layer.module
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return dict(named)


def _names(first: Layer, layer: Layer) -> dict[str, str]:
    """What modules of `layer` are called, by what the same ones of `first` are."""
    pairs = zip(first.module.modules(), layer.module.modules(), strict=True)
    return {
        vars(ours)[NAME_ATTRIBUTE]: vars(theirs)[NAME_ATTRIBUTE]
        for ours, theirs in pairs
        if NAME_ATTRIBUTE in vars(ours)
    }


class _Region(NamedTuple):
    """A first layer in a graph, its marks not included."""

    begin: fx.Node
    nodes: tuple[fx.Node, ...]
    end: fx.Node


def _regions(graph: fx.Graph) -> dict[str, _Region]:
    """By the layer's name."""
    found: dict[str, _Region] = {}
    begin: fx.Node | None = None
    inside: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is _BEGINS:
            if begin is not None or _said(node).layer in found:
                raise NotRepeatable(f"{_said(node).layer} runs twice, or inside another")
            begin, inside = node, []
        elif node.target is _ENDS:
            assert begin is not None and _said(begin).layer == _said(node).layer
            found[_said(node).layer] = _checked(_Region(begin, tuple(inside), node))
            begin = None
        elif begin is not None and node.op != "placeholder":
            inside.append(node)
    return found


def _checked(region: _Region) -> _Region:
    """`region`, if it depends on what the layer is given and on nothing else of the model's."""
    begin, nodes, end = region
    given, name = _said(begin), _said(begin).layer
    if _UNKNOWN in given.how.split():
        raise NotRepeatable(f"{name} takes something that is neither a tensor nor plain")
    if not _alike(given.x, _said(end).x):
        raise NotRepeatable(f"{name} returns another kind of tensor than it takes first")
    known = {begin, *nodes, *given.tensors}
    for node in nodes:
        if node.meta.get("unbacked_bindings"):
            raise NotRepeatable(f"{name} makes sizes out of values")
        if node.target is _AGAIN:
            raise NotRepeatable(f"a layer runs inside of {name}")
        for each in node.all_input_nodes:
            if each not in known and each.op != "placeholder" and isinstance(_value(each), torch.Tensor):
                raise NotRepeatable(f"{name} reads {each.name}, which it is not given")
        is_left = any(user not in known and user is not end for user in node.users)
        if is_left and not isinstance(_value(node), torch.SymInt):
            raise NotRepeatable(f"{name} leaves something behind beside what it returns")
    return region


def _copy(
    graph: fx.Graph, region: _Region, again: fx.Node, tensors: dict[fx.Node, fx.Node], names: dict[str, str]
) -> None:
    """Put `region` in the place of the mark `again`, over `tensors` and under `names` of its own."""
    begin, nodes, end = region
    first, other = _said(begin), _said(again)
    if first.how != other.how or not all(map(_alike, first.tensors, other.tensors)):
        raise NotRepeatable(f"{other.layer} is called in another way than {first.layer}, which is like it")
    new: dict[fx.Node, fx.Node] = {**tensors, begin: other.x}
    for ours, theirs in zip(first.tensors, other.tensors, strict=True):
        if new.setdefault(ours, theirs) is not theirs:
            raise NotRepeatable(f"{first.layer} takes one tensor twice, where {other.layer} takes two")

    for each in (each for node in nodes for each in node.all_input_nodes if each.op == "placeholder"):
        if each not in new and isinstance(_value(each), torch.Tensor):
            raise NotRepeatable(f"{first.layer} reads a tensor that is not its own and that it is not given")

    def renamed(argument: Any) -> Any:
        return names.get(argument, argument) if isinstance(argument, str) else argument

    with graph.inserting_before(again):
        for node in nodes:
            if isinstance(_value(node), torch.SymInt) and not any(each in new for each in node.all_input_nodes):
                continue  # a size of the batch, which Dynamo computes once too
            made = new[node] = graph.node_copy(node, lambda each: new.get(each, each))
            made.args, made.kwargs = map_aggregate(made.args, renamed), map_aggregate(made.kwargs, renamed)
            made.meta.pop("nn_module_stack", None)  # it is the first layer's
    result = new[_said(end).x]
    if _said(end).x in nodes:
        result.meta["example_value"] = _value(again)  # a value of its own: the model may return it
    again.replace_all_uses_with(result)
    graph.erase_node(again)


def _alike(a: fx.Node, b: fx.Node) -> bool:
    left, right = _value(a), _value(b)
    return all(
        str(getattr(left, name)) == str(getattr(right, name)) for name in ("shape", "dtype", "device", "layout")
    ) and str(left.stride()) == str(right.stride())


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


class _Mark(NamedTuple):
    """What a mark says."""

    x: fx.Node
    tensors: Sequence[fx.Node]
    layer: str
    how: str


def _said(mark: fx.Node) -> _Mark:
    arguments: Any = mark.args
    return _Mark(*arguments)


def check_what_was_read(guards: Iterable[str], lists: Sequence[LayerList]) -> None:
    """Raises `NotRepeatable` if the trace of a first layer depended on its place among the layers.

    `guards`: the expressions that Dynamo guarded, each of which names what was read.
    """
    read = tuple(guards)
    for kind in (kind for each in lists for kind in each.kinds if kind.others):
        path = "".join(f"._modules['{part}']" for part in kind.first.name.split("."))
        of_layer = [name.partition(path)[2] for name in read if path in name]
        if not of_layer:
            raise NotRepeatable(f"what of {kind.first.name} was read cannot be told")
        for place in sorted(kind.places):
            if any(re.search(rf"\b{re.escape(place)}\b", name) for name in of_layer):
                raise NotRepeatable(f"{kind.first.name} reads {place}, its place among the layers")


def told(lists: Sequence[LayerList]) -> str:
    """For a report: how many layers are copies."""
    kinds = [kind for each in lists for kind in each.kinds]
    copies, total = sum(len(kind.others) for kind in kinds), sum(1 + len(kind.others) for kind in kinds)
    return f"{copies} of {total} layers are traced as others were" if copies else ""
