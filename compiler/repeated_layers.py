"""Layers that are alike are traced twice, the first and the last of them: those between are copies of the first, over
tensors of their own.

While a model is traced, the first and the last layer of a kind say in the graph where they begin and end, and each
other one is a single node. The last has to be what a copy of the first would be there, node by node; then the others
become copies. What is no copy, or cannot be known to be one, is `NotRepeatable`: then every layer has to be traced.

Note [what a copy cannot know]: that a layer between does what no code of its kind does at either end. Python state that
a layer or its model changes on the way is refused where it lives longer than the call; code that tells layers apart by
where they are has to tell the last from the first, or to read their place, to be seen; and what a model makes of a
layer's code (`layer.forward.__code__`), or of an attribute that it gave to the tensor it returns, is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from piecegraph.compiler.alike_layers import Kind, Layer, LayerList
from piecegraph.compiler.layer_marks import (
    AGAIN,
    BEGINS,
    ENDS,
    GIVEN_BACK,
    UNKNOWN,
    Mark,
    mark_inside,
    said,
    take_frames_out,
)
from piecegraph.compiler.layer_names import NAME_ATTRIBUTE

_MAY_CHANGE = ("transformers.utils.output_capturing.",)
"""Objects that a trace may change, if it changes them back: transformers notes there that it is collecting nothing."""


class NotRepeatable(Exception):
    """Layers that look alike cannot be copies of each other; its words say why."""


def repeat(graph_module: fx.GraphModule, examples: Sequence[Any], lists: Sequence[LayerList]) -> tuple[Any, ...]:
    """Put copies of layers, over tensors of their own, where the graph has marks, and take all marks out.

    `examples`: one a placeholder, of a parameter or buffer itself; returned with those of new placeholders. Raises
    `NotRepeatable`, and then the graph is of no use.
    """
    graph = graph_module.graph
    if inside := mark_inside(graph_module):
        raise NotRepeatable(f"{inside} runs inside of an op")
    inputs = _Inputs(graph, examples)
    regions = _regions(graph)
    agains: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is AGAIN:
            agains.setdefault(said(node).layer, []).append(node)
    for kind in (kind for each in lists for kind in each.kinds if kind.between):
        if kind.first.name not in regions or kind.last.name not in regions:
            raise NotRepeatable(f"{kind.first.name} or {kind.last.name}, which are alike, does not run")
        tensors = inputs.of_copy(kind.first, kind.last, is_traced=True)
        _check_last(regions[kind.first.name], regions[kind.last.name], tensors, _Names(kind.first, kind.last))
    for each in lists:
        for layer, kind in each.layers:
            if layer not in kind.between:
                inputs.pass_by(layer)
                continue
            first = regions[kind.first.name]
            for again in agains.get(layer.name, ()):
                _copy(graph, first, again, inputs.of_copy(kind.first, layer), _Names(kind.first, layer))
    for region in regions.values():
        graph.erase_node(region.end)
        graph.erase_node(region.begin)
    take_frames_out(graph)
    try:
        graph.lint()
    except RuntimeError as error:
        raise NotRepeatable(f"copies do not fit: {error}") from None
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

    def of_copy(self, first: Layer, layer: Layer, *, is_traced: bool = False) -> dict[fx.Node, fx.Node]:
        """For each placeholder that is a tensor of `first`, the one that is the same tensor of `layer`: a new one if
        need be, unless `layer` was traced."""
        found: dict[fx.Node, fx.Node] = {}
        ours, theirs = _tensors(first), _tensors(layer)
        paths = {id(tensor): path for path, tensor in reversed(ours.items())}
        for node in [each for each in self._placeholders if id(self._example[each]) in paths]:
            tensor = theirs[paths[id(self._example[node])]]
            if id(tensor) not in self._of_tensor:
                if is_traced:
                    raise NotRepeatable(f"{layer.name} does not read all that {first.name} does")
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
        made.meta = {**like.meta, "example_value": _another(like.meta["example_value"])}
        self._placeholders.insert(self._placeholders.index(self._last) + 1, made)
        self._example[made] = tensor
        self._of_tensor[id(tensor)] = self._last = made


def _another(fake: torch.Tensor) -> torch.Tensor:
    """A fake tensor like `fake`, of memory of its own."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True))
    memory = fake.new_empty(fake.storage_offset() + extent if fake.numel() else 0)
    made = memory.as_strided(fake.shape, fake.stride(), fake.storage_offset() if fake.numel() else 0)
    return made.requires_grad_(fake.requires_grad)


def _tensors(layer: Layer) -> dict[str, torch.Tensor]:
    """Its parameters and buffers by name in it, each under all its names."""
    module = layer.module
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return dict(named)


class _Names:
    """What modules of a layer are called, by what the same ones of the first are."""

    def __init__(self, first: Layer, layer: Layer) -> None:
        pairs = zip(first.module.modules(), layer.module.modules(), strict=True)
        self._first = first.name
        self._of = {
            vars(ours)[NAME_ATTRIBUTE]: vars(theirs)[NAME_ATTRIBUTE]
            for ours, theirs in pairs
            if NAME_ATTRIBUTE in vars(ours)
        }

    def in_place_of(self, argument: Any) -> Any:
        """Raises `NotRepeatable` for a text that the name of a layer went into."""
        if not isinstance(argument, str):
            return argument
        if argument in self._of:
            return self._of[argument]
        if any(name in argument for name in (*self._of, self._first)):
            raise NotRepeatable(f"{self._first} makes {argument!r} out of its name")
        return argument


class _Region(NamedTuple):
    """A layer in a graph, its marks not included."""

    begin: fx.Node
    nodes: tuple[fx.Node, ...]
    end: fx.Node


def _regions(graph: fx.Graph) -> dict[str, _Region]:
    """By the layer's name."""
    found: dict[str, _Region] = {}
    begin: fx.Node | None = None
    inside: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is BEGINS:
            if begin is not None or said(node).layer in found:
                raise NotRepeatable(f"{said(node).layer} runs twice, or inside another")
            begin, inside = node, []
        elif node.target is ENDS:
            assert begin is not None and said(begin).layer == said(node).layer
            found[said(node).layer] = _checked(_Region(begin, tuple(inside), node))
            begin = None
        elif begin is not None and node.op != "placeholder":
            inside.append(node)
    return found


def _checked(region: _Region) -> _Region:
    """`region`, if it depends on what the layer is given and changes nothing but tensors."""
    begin, nodes, end = region
    given, left, name = said(begin), said(end), said(begin).layer
    if UNKNOWN in given.how.split():
        raise NotRepeatable(f"{name} takes something that is neither a tensor nor plain")
    if left.how == GIVEN_BACK:
        raise NotRepeatable(f"{name} returns the very tensor that it takes first")
    if (left.how, list(left.tensors)) != (given.how, list(given.tensors)):
        raise NotRepeatable(f"{name} changes what it is given")
    if not _alike(given.x, left.x):
        raise NotRepeatable(f"{name} returns another kind of tensor than it takes first")
    known = {begin, end, *nodes, *given.tensors}
    for node in nodes:
        if node.meta.get("unbacked_bindings"):
            raise NotRepeatable(f"{name} makes sizes out of values")
        if node.target is AGAIN:
            raise NotRepeatable(f"a layer runs inside of {name}")
        if node.op == "get_attr" and isinstance(_attribute(node), nn.Module):
            raise NotRepeatable(f"{name} has an op that runs a graph")
        for each in node.all_input_nodes:
            if each not in known and each.op != "placeholder" and isinstance(_value(each), torch.Tensor):
                raise NotRepeatable(f"{name} reads {each.name}, which it is not given")
        is_left = any(user not in known for user in node.users) and node is not left.x
        if is_left and not isinstance(_value(node), torch.SymInt):
            raise NotRepeatable(f"{name} leaves something behind beside what it returns")
    return region


def _attribute(node: fx.Node) -> Any:
    owner: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        owner = getattr(owner, part)
    return owner


def _is_shared(node: fx.Node, new: dict[fx.Node, fx.Node]) -> bool:
    """A size of the batch, which Dynamo computes once for all layers."""
    return isinstance(_value(node), torch.SymInt) and not any(each in new for each in node.all_input_nodes)


def _given_instead(first: _Region, other: Mark, tensors: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """What stands in another layer for what the first is given, and for its own `tensors`."""
    mine = said(first.begin)
    is_called_alike = mine.how == other.how and mine.places == other.places
    if not is_called_alike or not all(map(_alike, mine.tensors, other.tensors)):
        raise NotRepeatable(f"{other.layer} is called in another way than {mine.layer}, which is like it")
    given = dict(zip(mine.tensors, other.tensors, strict=True))
    if any(tensors.get(each, theirs) is not theirs for each, theirs in given.items()):
        raise NotRepeatable(f"{mine.layer} is given a tensor of its own, and {other.layer} another")
    new = {**tensors, **given}
    for each in (each for node in first.nodes for each in node.all_input_nodes if each.op == "placeholder"):
        if each not in new and isinstance(_value(each), torch.Tensor):
            raise NotRepeatable(f"{mine.layer} reads a tensor that is not its own and that it is not given")
    return new


def _check_last(first: _Region, last: _Region, tensors: dict[fx.Node, fx.Node], names: _Names) -> None:
    """Raises `NotRepeatable` unless `last` is what a copy of `first` would be there."""
    new = _given_instead(first, said(last.begin), tensors)
    theirs = iter(last.nodes)
    for node in first.nodes:
        if _is_shared(node, new):
            continue
        other = new[node] = next(theirs, last.end)
        made = map_aggregate((node.args, node.kwargs), lambda each: _copied(each, new, names))
        if (node.op, node.target, str(made)) != (other.op, other.target, str((other.args, other.kwargs))) or not (
            _alike(node, other)
        ):
            raise NotRepeatable(f"{said(last.end).layer} is not what {said(first.end).layer} is, at {other.name}")
    result = said(first.end).x
    if next(theirs, None) is not None or new.get(result, result) is not said(last.end).x:
        raise NotRepeatable(f"{said(last.end).layer} does not end as {said(first.end).layer} does")


def _copied(argument: Any, new: dict[fx.Node, fx.Node], names: _Names) -> Any:
    return new.get(argument, argument) if isinstance(argument, fx.Node) else names.in_place_of(argument)


def _copy(graph: fx.Graph, first: _Region, again: fx.Node, tensors: dict[fx.Node, fx.Node], names: _Names) -> None:
    """Put `first` in the place of the mark `again`, over `tensors` and under `names` of its own."""
    new = _given_instead(first, said(again), tensors)
    with graph.inserting_before(again):
        for node in first.nodes:
            if _is_shared(node, new):
                continue
            made = new[node] = graph.node_copy(node, lambda each: new.get(each, each))
            made.args = map_aggregate(made.args, names.in_place_of)
            made.kwargs = map_aggregate(made.kwargs, names.in_place_of)
            made.meta.pop("nn_module_stack", None)  # it is the first layer's
    result = new.get(said(first.end).x, said(first.end).x)
    if said(first.end).x in first.nodes:
        result.meta["example_value"] = _value(again)  # a value of its own: the model may return it
    again.replace_all_uses_with(result)
    graph.erase_node(again)


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Values of the same kind, and numbers that are the same."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (
                *(str(getattr(value, name)) for name in ("shape", "dtype", "device", "layout")),
                str(value.stride()),
            )
        return str(value)

    left, right = (torch.utils._pytree.tree_map(plain, _value(each)) for each in (a, b))
    return bool(left == right)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def check_what_was_read(guards: Iterable[str], kinds: Sequence[Kind]) -> None:
    """Raises `NotRepeatable` if the trace depended on the place of a layer.

    `guards`: the expressions that Dynamo guarded, each of which names what was read.
    """
    read = "\n".join(guards)
    for kind in kinds:
        path = "".join(f"._modules['{part}']" for part in kind.first.name.split("."))
        if path not in read:
            raise NotRepeatable(f"what of {kind.first.name} was read cannot be told")
        for place in sorted(kind.places):
            if re.search(rf"\b{re.escape(place)}\b", read):
                raise NotRepeatable(f"{kind.first.name}, or what uses it, reads {place}, its place among the layers")


def check_what_was_changed(changed: Iterable[str]) -> None:
    """Raises `NotRepeatable` if a layer may have read what another, or the model, had changed before it.

    `changed`: as `dynamo.OnGraph` has them.
    """
    for each in changed:
        if not each.startswith(_MAY_CHANGE):
            raise NotRepeatable(f"the model changes {each} on the way")


def told(kinds: Sequence[Kind]) -> str:
    """For a report: how many layers are copies."""
    copies, total = sum(len(kind.between) for kind in kinds), sum(len(kind.layers) for kind in kinds)
    return f"{copies} of {total} layers are copies of one that was traced"
