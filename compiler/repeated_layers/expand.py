"""Replace repeated layers by copies: of layers that are alike, only the first and the last are traced.

While a model is traced, the first and the last layer of a kind mark in the graph where they begin and end, and each
middle layer is a single node. If the last layer equals a copy of the first, node by node, the middle layers become
copies of the first, over their own tensors. Otherwise, or where a layer may differ from a copy, `NotRepeatable` is
raised, and every layer has to be traced.

Note [what a copy cannot know]: a copy cannot know that a middle layer does something that neither end does. Python
state that a layer or its model changes is refused where it outlives the call. Code that distinguishes layers by their
position is seen only if it distinguishes the last from the first, or reads the position. What a model makes of a
layer's code (`layer.forward.__code__`), or of an attribute of the tensor a layer returns, is not seen.
"""

from __future__ import annotations

import collections
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from piecegraph.compiler.repeated_layers.find import NAME_ATTRIBUTE, Layer, LayerKind, LayerList
from piecegraph.compiler.repeated_layers.markers import (
    LAYER_BEGIN,
    LAYER_END,
    LAYER_REPEATED,
    RETURNS_INPUT,
    UNKNOWN,
    Marker,
    find_nested_marker,
    parse_marker,
    strip_marker_frames,
)

_MAY_CHANGE = ("transformers.utils.output_capturing.",)
"""Objects that a trace may change if it restores them: transformers notes there that it is collecting nothing."""


class NotRepeatable(Exception):
    """An error for layers that look alike but cannot be copies of each other. The message says why."""


def expand_repeated_layers(
    graph_module: fx.GraphModule, examples: Sequence[Any], lists: Sequence[LayerList]
) -> tuple[Any, ...]:
    """Replace the marker of each middle layer by a copy of the first layer, and remove all markers, in place.

    `examples` has one value a placeholder, for a parameter or buffer the tensor itself. Returns the examples with
    those of new placeholders. Raises `NotRepeatable`, which leaves the graph unusable.
    """
    graph = graph_module.graph
    if inside := find_nested_marker(graph_module):
        raise NotRepeatable(f"{inside} runs inside a higher-order op")
    inputs = _Inputs(graph, examples)
    regions = _regions(graph)
    repeated: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is LAYER_REPEATED:
            repeated.setdefault(parse_marker(node).layer, []).append(node)
    for kind in (kind for each in lists for kind in each.kinds if kind.middle):
        if kind.first.name not in regions or kind.last.name not in regions:
            raise NotRepeatable(f"{kind.first.name} or {kind.last.name}, which are alike, does not run")
        tensors = inputs.for_copy(kind.first, kind.last, is_traced=True)
        _check_last(regions[kind.first.name], regions[kind.last.name], tensors, _Names(kind.first, kind.last))
    for each in lists:
        for layer, kind in each.layers:
            if layer not in kind.middle:
                inputs.add_after(layer)
                continue
            first = regions[kind.first.name]
            for marker in repeated.get(layer.name, ()):
                _copy(graph, first, marker, inputs.for_copy(kind.first, layer), _Names(kind.first, layer))
    for region in regions.values():
        graph.erase_node(region.end)
        graph.erase_node(region.begin)
    strip_marker_frames(graph)
    try:
        graph.lint()
    except RuntimeError as error:
        raise NotRepeatable(f"copies do not fit: {error}") from None
    return inputs.examples()


class _Inputs:
    """The placeholders of a graph. Those of a copy are added after those of the layer before the copy."""

    def __init__(self, graph: fx.Graph, examples: Sequence[Any]) -> None:
        self._graph = graph
        self._placeholders = list(graph.find_nodes(op="placeholder"))
        self._example = dict(zip(self._placeholders, examples, strict=True))
        self._of_tensor = {id(each): node for node, each in self._example.items() if isinstance(each, torch.Tensor)}
        self._last: fx.Node | None = None

    def examples(self) -> tuple[Any, ...]:
        return tuple(self._example[node] for node in self._placeholders)

    def add_after(self, layer: Layer) -> None:
        """Add new placeholders after those of `layer` from now on."""
        own = [self._of_tensor[key] for key in map(id, _tensors(layer).values()) if key in self._of_tensor]
        self._last = max([*own, *filter(None, [self._last])], key=self._placeholders.index, default=None)

    def for_copy(self, first: Layer, layer: Layer, *, is_traced: bool = False) -> dict[fx.Node, fx.Node]:
        """Map each placeholder of a tensor of `first` to the placeholder of the same tensor of `layer`.

        Missing placeholders are added, unless `layer` was traced. Raises `NotRepeatable`.
        """
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
        assert self._last is not None, "add_after was called with the first layer before"
        was, becomes = (each.name.replace(".", "_modules_") for each in (first, layer))
        with self._graph.inserting_after(self._last):
            made = self._graph.placeholder(str(like.target).replace(was, becomes))
        made.meta = {**like.meta, "example_value": _another(like.meta["example_value"])}
        self._placeholders.insert(self._placeholders.index(self._last) + 1, made)
        self._example[made] = tensor
        self._of_tensor[id(tensor)] = self._last = made


def _another(fake: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor like `fake` in its own memory."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True))
    memory = fake.new_empty(fake.storage_offset() + extent if fake.numel() else 0)
    made = memory.as_strided(fake.shape, fake.stride(), fake.storage_offset() if fake.numel() else 0)
    return made.requires_grad_(fake.requires_grad)


def _tensors(layer: Layer) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a layer by name within the layer, each under all its names."""
    module = layer.module
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return dict(named)


class _Names:
    """The names of a layer's modules, by the names of the corresponding modules of the first layer."""

    def __init__(self, first: Layer, layer: Layer) -> None:
        pairs = zip(first.module.modules(), layer.module.modules(), strict=True)
        self._first = first.name
        self._of = {
            vars(ours)[NAME_ATTRIBUTE]: vars(theirs)[NAME_ATTRIBUTE]
            for ours, theirs in pairs
            if NAME_ATTRIBUTE in vars(ours)
        }

    def substitute(self, argument: Any) -> Any:
        """Return `argument` with a name of the first layer replaced. Raises `NotRepeatable` for text made of a name."""
        if not isinstance(argument, str):
            return argument
        if argument in self._of:
            return self._of[argument]
        if any(name in argument for name in (*self._of, self._first)):
            raise NotRepeatable(f"{self._first} makes {argument!r} out of its name")
        return argument


class _Region(NamedTuple):
    """The nodes of a layer in a graph, between its markers."""

    begin: fx.Node
    nodes: tuple[fx.Node, ...]
    end: fx.Node


def _regions(graph: fx.Graph) -> dict[str, _Region]:
    """Return the region of each traced layer by the layer's name. Raises `NotRepeatable`."""
    found: dict[str, _Region] = {}
    begin: fx.Node | None = None
    inside: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is LAYER_BEGIN:
            if begin is not None or parse_marker(node).layer in found:
                raise NotRepeatable(f"{parse_marker(node).layer} runs twice, or inside another")
            begin, inside = node, []
        elif node.target is LAYER_END:
            assert begin is not None and parse_marker(begin).layer == parse_marker(node).layer
            found[parse_marker(node).layer] = _checked(_Region(begin, tuple(inside), node))
            begin = None
        elif begin is not None and node.op != "placeholder":
            inside.append(node)
    return found


def _checked(region: _Region) -> _Region:
    """Return `region` if it depends only on the layer's inputs and changes only tensors. Raises `NotRepeatable`."""
    begin, nodes, end = region
    given, left, name = parse_marker(begin), parse_marker(end), parse_marker(begin).layer
    if UNKNOWN in given.how.split():
        raise NotRepeatable(f"{name} takes something that is neither a tensor nor plain")
    if left.how == RETURNS_INPUT:
        raise NotRepeatable(f"{name} returns the very tensor that it takes first")
    if (left.how, list(left.tensors)) != (given.how, list(given.tensors)):
        raise NotRepeatable(f"{name} changes what it is given")
    if not _alike(given.x, left.x):
        raise NotRepeatable(f"{name} returns another kind of tensor than it takes first")
    known = {begin, end, *nodes, *given.tensors}
    for node in nodes:
        if node.meta.get("unbacked_bindings"):
            raise NotRepeatable(f"{name} makes sizes out of values")
        if node.target is LAYER_REPEATED:
            raise NotRepeatable(f"a layer runs inside {name}")
        if node.op == "get_attr" and isinstance(_attribute(node), nn.Module):
            raise NotRepeatable(f"{name} has an op that runs a graph")
        for each in node.all_input_nodes:
            if each not in known and each.op != "placeholder" and isinstance(_value(each), torch.Tensor):
                raise NotRepeatable(f"{name} reads {each.name}, which it is not given")
        is_left = any(user not in known for user in node.users) and node is not left.x
        if is_left and not isinstance(_value(node), torch.SymInt):
            raise NotRepeatable(f"{name} computes a value besides its result that is used after it")
    return region


def _attribute(node: fx.Node) -> Any:
    owner: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        owner = getattr(owner, part)
    return owner


def _is_shared(node: fx.Node, new: dict[fx.Node, fx.Node]) -> bool:
    """Return whether `node` is a size of the batch, which Dynamo computes once for all layers."""
    return isinstance(_value(node), torch.SymInt) and not any(each in new for each in node.all_input_nodes)


def _match_inputs(first: _Region, other: Marker, tensors: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Map the inputs of the first layer to those of another, beside its own `tensors`. Raises `NotRepeatable`."""
    mine = parse_marker(first.begin)
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
    """Raise `NotRepeatable` unless `last` equals a copy of `first`."""
    new = _match_inputs(first, parse_marker(last.begin), tensors)
    first_end, last_end = parse_marker(first.end), parse_marker(last.end)
    theirs = iter(last.nodes)
    for node in first.nodes:
        if _is_shared(node, new):
            continue
        other = new[node] = next(theirs, last.end)
        made = map_aggregate((node.args, node.kwargs), lambda each: _copied(each, new, names))
        if (node.op, node.target, str(made)) != (other.op, other.target, str((other.args, other.kwargs))) or not (
            _alike(node, other)
        ):
            raise NotRepeatable(f"{last_end.layer} is not what {first_end.layer} is, at {other.name}")
    result = first_end.x
    if next(theirs, None) is not None or new.get(result, result) is not last_end.x:
        raise NotRepeatable(f"{last_end.layer} does not end as {first_end.layer} does")


def _copied(argument: Any, new: dict[fx.Node, fx.Node], names: _Names) -> Any:
    return new.get(argument, argument) if isinstance(argument, fx.Node) else names.substitute(argument)


def _copy(graph: fx.Graph, first: _Region, marker: fx.Node, tensors: dict[fx.Node, fx.Node], names: _Names) -> None:
    """Replace `marker` by a copy of `first` over the copy's `tensors` and `names`."""
    new = _match_inputs(first, parse_marker(marker), tensors)
    with graph.inserting_before(marker):
        for node in first.nodes:
            if _is_shared(node, new):
                continue
            made = new[node] = graph.node_copy(node, lambda each: new.get(each, each))
            made.args = map_aggregate(made.args, names.substitute)
            made.kwargs = map_aggregate(made.kwargs, names.substitute)
            made.meta.pop("nn_module_stack", None)  # it is the first layer's
    result = new.get(parse_marker(first.end).x, parse_marker(first.end).x)
    if parse_marker(first.end).x in first.nodes:
        result.meta["example_value"] = _value(marker)  # a separate value: the model may return it
    marker.replace_all_uses_with(result)
    graph.erase_node(marker)


def _alike(a: fx.Node, b: fx.Node) -> bool:
    """Return whether the values of two nodes have the same layout, and numbers are equal."""

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


def check_guarded_places(guards: Iterable[str], kinds: Sequence[LayerKind]) -> None:
    """Raise `NotRepeatable` if the trace depended on the place of a layer in its list.

    `guards`: the expressions that Dynamo guarded, each of which names a value that was read.
    """
    read = "\n".join(guards)
    for kind in kinds:
        path = "".join(f"._modules['{part}']" for part in kind.first.name.split("."))
        if path not in read:
            raise NotRepeatable(f"Dynamo has no guard on {kind.first.name}, so what was read of it is not known")
        for place in sorted(kind.places):
            if re.search(rf"\b{re.escape(place)}\b", read):
                raise NotRepeatable(f"{kind.first.name}, or what uses it, reads {place}, its place among the layers")


def check_guarded_identities(guards: Iterable[Any], kinds: Sequence[LayerKind]) -> None:
    """Raise `NotRepeatable` if the trace depended on the identity of a layer or of a part of it.

    A trace does if it read the `id` of a layer, found a layer anywhere but in the model's tree, or read a table that
    holds a layer, its `id` or its name. `guards` are Dynamo's, with the guarded values.
    """
    names = {layer.name for kind in kinds for layer in kind.layers}
    parts = {id(part): layer.name for kind in kinds for layer in kind.layers for part in _parts(layer.module)}
    for guard in guards:
        if not guard.has_value:
            continue
        if guard.guard_type == "ID_MATCH" and id(guard.value) in parts:
            raise NotRepeatable(f"the trace depends on the identity of {parts[id(guard.value)]} or of a part of it")
        if _IN_THE_TREE.match(str(guard.name)):
            continue
        if id(guard.value) in parts:
            raise NotRepeatable(f"{guard.name} is {parts[id(guard.value)]}, or a part of it")
        for item in _items(guard.value):
            found = (
                parts.get(id(item))
                or (type(item) is int and parts.get(item))
                or (type(item) is str and item in names and item)
            )
            if found:
                raise NotRepeatable(f"{guard.name} distinguishes layers: it holds {found}")


_IN_THE_TREE = re.compile(
    r"(?:L\['module'\]|module)(?:\._modules\['[^']*'\])*(?:\._(?:modules|parameters|buffers)\b.*)?$"
)
"""Dynamo's names for modules and their tensors where `nn.Module` keeps them."""


def _parts(layer: nn.Module) -> Iterator[Any]:
    for module in layer.modules():
        yield module
        yield from (each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None)


def _items(value: Any) -> Iterator[Any]:
    """Yield the items and keys of a table by which code may find an object: also in tuples and weak references."""
    if isinstance(value, Mapping):
        found: Iterable[Any] = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        found = tuple(value)
    else:
        return
    for item in found:
        if isinstance(item, weakref.ReferenceType):
            item = item()
        if isinstance(item, tuple):
            yield from _items(item)
        elif isinstance(item, int | str | nn.Module | torch.Tensor):
            yield item


def check_changed_attributes(changed: Iterable[str]) -> None:
    """Raise `NotRepeatable` if a layer may have read an attribute that another layer, or the model, had changed.

    `changed`: attributes as in `dynamo.OnGraph`.
    """
    for each in changed:
        if not each.startswith(_MAY_CHANGE):
            raise NotRepeatable(f"the model changes {each} while it runs")


def summarize_copies(kinds: Sequence[LayerKind]) -> str:
    """Return how many layers are copies, as a note for the report."""
    copies, total = sum(len(kind.middle) for kind in kinds), sum(len(kind.layers) for kind in kinds)
    return f"{copies} of {total} layers are copies of one that was traced"
