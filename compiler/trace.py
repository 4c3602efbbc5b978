"""A module and a call of it become one FX graph whose every input is accounted for."""

from __future__ import annotations

import inspect
import re
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from piecegraph.compiler.alike_layers import lists_of_layers
from piecegraph.compiler.call_spec import CallSpec, ConstantLeaf, ResultSpec, TensorLeaf
from piecegraph.compiler.dynamic_dims import DynamicDims, bind_arguments, check_examples, declared_dims, leaf_paths
from piecegraph.compiler.dynamo import DynamoGraph, dynamo_graph, guard_name, mark_dynamic_size
from piecegraph.compiler.guards import GuardAudit, audit_guards
from piecegraph.compiler.layer_marks import traced_twice
from piecegraph.compiler.repeated_layers import (
    NotRepeatable,
    check_what_was_changed,
    check_what_was_read,
    repeat,
    told,
)
from piecegraph.compiler.traced_globals import GlobalFact, globals_read
from piecegraph.compiler.traced_sources import digests_of_files, files_of_code
from piecegraph.errors import CompileError, GraphBreak, InputMismatch, SizeSpecialized


@dataclass(frozen=True, slots=True)
class SizeInput:
    """A placeholder that is the size of `leaf`'s dim `dim`."""

    name: str
    leaf: int
    dim: int


@dataclass(frozen=True, slots=True)
class ArgumentInput:
    """A placeholder that is the caller's tensor `leaf`."""

    name: str
    leaf: int


@dataclass(frozen=True, slots=True)
class BoundInput:
    """A placeholder that is a tensor of the module, fixed when it was compiled."""

    name: str
    kind: str  # "parameter", "buffer", "constant", or "merged": several parameters stored as one tensor
    tensor: torch.Tensor
    members: tuple[str, ...] = ()  # of a merged one: the names of the parameters, in order

    @classmethod
    def of(cls, module: torch.nn.Module, kind: str, name: str) -> BoundInput:
        """The parameter, or buffer, of that name. Raises `AttributeError` where there is none."""
        return cls(name, kind, module.get_buffer(name) if kind == "buffer" else module.get_parameter(name))


GraphInput = SizeInput | ArgumentInput | BoundInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One graph, and what each of its placeholders and outputs is."""

    graph_module: fx.GraphModule
    inputs: tuple[GraphInput, ...]  # one a placeholder, in order
    size_symbols: dict[str, str]  # symbol in the graph -> size name
    call_spec: CallSpec
    result_spec: ResultSpec
    guards: GuardAudit
    sources: Mapping[str, str | None]  # file of every function traced -> sha256; None: it cannot be read
    globals: tuple[GlobalFact, ...]  # that the trace read
    seconds: float
    note: str = ""  # how layers were traced


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleCall:
    """A call of a module, taken apart: what is dynamic in it, and what of it is part of the trace."""

    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec
    paths: tuple[str, ...]  # of the leaves
    declared: Mapping[int, Mapping[int, str]]  # leaf -> {dim: size name}
    call_spec: CallSpec

    @classmethod
    def of(
        cls, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_dims: DynamicDims
    ) -> ExampleCall:
        """Raises `InputMismatch` where the arguments do not fit `forward`, `ConfigError` for wrong `dynamic_dims`."""
        signature = inspect.signature(module.forward)
        try:
            bound = bind_arguments(signature, args, kwargs)
        except TypeError as error:
            raise InputMismatch(f"the example inputs do not fit forward{signature}: {error}.") from None
        paths = leaf_paths(bound.arguments)
        declared = declared_dims(dynamic_dims, paths)
        check_examples(declared, paths)
        leaves, tree = pytree.tree_flatten(dict(bound.arguments))
        return cls(
            leaves=tuple(leaves),
            tree=tree,
            paths=tuple(path for path, _ in paths),
            declared=declared,
            call_spec=_call_spec(signature, leaves, tree, paths, declared),
        )


def trace(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_dims: DynamicDims) -> Traced:
    """Trace `module(*args, **kwargs)` to one graph, for every size of the declared dims.

    The caller's tensors are not touched: tracing marks copies. Raises `GraphBreak` (naming the line),
    `SizeSpecialized` (saying by what), `UnknownGuard`, and what `ExampleCall.of` raises. Declared sizes are at
    least 1.
    """
    start = time.perf_counter()
    given = ExampleCall.of(module, args, kwargs, dynamic_dims)
    declared = given.declared
    examples = [_marked_copy(leaf, declared.get(index, {})) for index, leaf in enumerate(given.leaves)]
    bound = inspect.BoundArguments(given.call_spec.signature, OrderedDict(pytree.tree_unflatten(examples, given.tree)))

    sized = tuple((examples[index], dim) for index, dims in declared.items() for dim in dims)

    def call(args: Any, kwargs: Any, sized: tuple[tuple[torch.Tensor, int], ...]) -> Any:
        for tensor, dim in sized:
            torch._check(tensor.shape[dim] >= 1)  # torch's own attention asks whether a size is 0
        return module(*args, **kwargs)

    try:
        with torch.no_grad():
            graph, note = _graph(call, (bound.args, bound.kwargs, sized), module)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise _trace_error(error, declared) from error
    if not graph.examples and not len(graph.graph_module.graph.nodes):
        raise CompileError(
            "the module computes nothing on tensors (or TorchDynamo is disabled), so there is no graph to compile."
        )
    if graph.mutations:
        raise CompileError(
            f"forward changes objects that outlive the call: {'; '.join(graph.mutations)}. A compiled model runs "
            "tensors only, so the change would happen once, at trace time. Return the value instead, or keep it in a "
            "buffer changed in place."
        )
    read = globals_read(graph.guards)
    inputs, symbols = _graph_inputs(graph, module, examples, given.paths, declared)
    return Traced(
        graph_module=graph.graph_module,
        inputs=inputs,
        size_symbols=symbols,
        call_spec=given.call_spec,
        result_spec=_result_spec(graph, examples),
        guards=_audited(graph),
        sources=digests_of_files({*files_of_code(graph.traced_code), *read.files}),
        globals=read.facts,
        seconds=time.perf_counter() - start,
        note=note,
    )


def _graph(call: Callable[..., Any], args: Sequence[Any], module: nn.Module) -> tuple[DynamoGraph, str]:
    """The graph of a call of `module`, and what is to be told of its layers: most of those that are alike are copies of
    the first (Note [what a copy cannot know])."""
    try:
        lists = lists_of_layers(module)
    except Exception as error:  # whatever modules do when they are looked into
        return dynamo_graph(call, args), f"every layer was traced: {_first_line(error)}"
    kinds = [kind for each in lists for kind in each.kinds if kind.between]
    if not kinds:
        return dynamo_graph(call, args), ""
    refused: list[NotRepeatable] = []

    def on_graph(graph_module: fx.GraphModule, examples: Sequence[Any], changed: Sequence[str]) -> Sequence[Any]:
        try:
            check_what_was_changed(changed)
            return repeat(graph_module, examples, lists)
        except NotRepeatable as error:
            refused.append(error)
            raise

    try:
        with traced_twice(kinds):
            graph = dynamo_graph(call, args, on_graph)
        check_what_was_read(map(guard_name, graph.guards), kinds)
        _audited(graph)
    except Exception as error:  # an error of the model's own comes again
        why = next(map(str, refused), "") or (str(error) if isinstance(error, NotRepeatable) else _first_line(error))
        return dynamo_graph(call, args), f"every layer was traced: {why}"
    return graph, told(kinds)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _audited(graph: DynamoGraph) -> GuardAudit:
    return audit_guards([(entry.guard_type, guard_name(entry)) for entry in graph.guards])


def _marked_copy(leaf: Any, dims: Mapping[int, str]) -> Any:
    """A copy of an example to trace with, its declared dims dynamic; what is no tensor stays as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = [int(size) for size in leaf.shape]
    copy = torch.empty_strided(shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    for dim, name in dims.items():
        mark_dynamic_size(copy, dim, name)
    return copy


def _graph_inputs(
    graph: DynamoGraph,
    module: torch.nn.Module,
    examples: Sequence[Any],
    paths: Sequence[str],
    declared: Mapping[int, Mapping[int, str]],
) -> tuple[tuple[GraphInput, ...], dict[str, str]]:
    """What each placeholder is, and the size name of each symbol."""
    leaf_of = {id(example): index for index, example in enumerate(examples) if isinstance(example, torch.Tensor)}
    weight_of = {id(t): (name, "buffer") for name, t in module.named_buffers(remove_duplicate=False)}
    weight_of |= {id(t): (name, "parameter") for name, t in module.named_parameters(remove_duplicate=False)}
    placeholders = [node for node in graph.graph_module.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == len(graph.examples), "one example a placeholder"

    symbols: dict[str, str] = {}  # symbol -> size name
    places: dict[str, tuple[int, int]] = {}  # symbol -> (leaf, dim)
    for node, example in zip(placeholders, graph.examples, strict=True):
        leaf = leaf_of.get(id(example))
        if leaf is None:
            continue
        for dim, size in enumerate(node.meta["example_value"].shape):
            name = declared.get(leaf, {}).get(dim)
            expression = size.node.expr if isinstance(size, torch.SymInt) else size
            if name is not None and not getattr(expression, "is_symbol", False):
                raise SizeSpecialized(
                    f"{paths[leaf]}.shape[{dim}] is declared dynamic as {name!r}, but tracing fixed it to "
                    f"{expression}{_line_that_fixes(node, expression)}. "
                    "Take the size from the tensor's shape there, or leave that dim out of dynamic_dims."
                )
            if name is not None:
                symbols[str(expression)] = name
                places.setdefault(str(expression), (leaf, dim))

    inputs: list[GraphInput] = []
    for node, example in zip(placeholders, graph.examples, strict=True):
        if isinstance(example, torch.Tensor):
            if id(example) in leaf_of:
                leaf = leaf_of[id(example)]
                inputs.append(ArgumentInput(paths[leaf], leaf))
            else:
                name, kind = weight_of.get(id(example), (node.name, "constant"))
                inputs.append(BoundInput(name, kind, example))
        elif isinstance(example, torch.SymInt) and str(example.node.expr) in places:
            symbol = str(example.node.expr)
            inputs.append(SizeInput(symbols[symbol], *places[symbol]))
        else:
            raise CompileError(
                f"the traced graph has an input {node.name} = {example!r} that is neither a tensor nor a declared "
                "size. Declare the dim it comes from in dynamic_dims, or pass the value as a tensor."
            )
    return tuple(inputs), symbols


def _line_that_fixes(placeholder: fx.Node, size: Any) -> str:
    """`" at FILE:LINE (CODE)"` of the first operation that writes the size as a number, else of the first
    that reads the tensor; nothing where Dynamo kept no line."""
    operations = [node for node in placeholder.graph.nodes if node.op in ("call_function", "call_method")]
    writes = [node for node in operations if int(size) in pytree.tree_leaves((node.args, node.kwargs))]
    for node in (*writes, *placeholder.users):
        lines = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*(.+)', node.meta.get("stack_trace") or "")
        outside = [found for found in lines if found[0] != __file__]
        if outside:
            file, line, code = outside[-1]
            return f" at {file}:{line} ({code.strip()})"
    return ""


def _call_spec(
    signature: inspect.Signature,
    leaves: Sequence[Any],
    tree: pytree.TreeSpec,
    paths: Sequence[tuple[str, Any]],
    declared: Mapping[int, Mapping[int, str]],
) -> CallSpec:
    specs: list[TensorLeaf | ConstantLeaf] = []
    for index, leaf in enumerate(leaves):
        path = paths[index][0]
        if isinstance(leaf, torch.Tensor):
            dims = declared.get(index, {})
            shape = tuple(dims.get(dim, int(size)) for dim, size in enumerate(leaf.shape))
            strides = None if leaf.is_contiguous() else tuple(leaf.stride())
            specs.append(TensorLeaf(path=path, dtype=leaf.dtype, device=leaf.device, shape=shape, strides=strides))
        else:
            specs.append(ConstantLeaf(path=path, value=leaf))
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature.parameters.values()
    is_flat = all(p.kind in positional for p in parameters) and len(leaves) == len(parameters)
    is_flat = is_flat and all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return CallSpec(signature=signature, leaves=tuple(specs), tree=tree, is_flat=is_flat)


def _result_spec(graph: DynamoGraph, examples: Sequence[Any]) -> ResultSpec:
    output = next(iter(reversed(graph.graph_module.graph.nodes)))
    fakes = [node.meta["example_value"] if isinstance(node, fx.Node) else node for node in output.args[0]]
    index_of = {id(fake): index for index, fake in enumerate(fakes)}
    leaf_of = {id(example): index for index, example in enumerate(examples) if isinstance(example, torch.Tensor)}
    bound = {id(t): t for t in graph.examples if isinstance(t, torch.Tensor)}
    leaves, tree = pytree.tree_flatten(graph.result)
    sources: list[tuple[str, Any]] = []
    for leaf in leaves:
        if id(leaf) in index_of:
            sources.append(("output", index_of[id(leaf)]))
        elif id(leaf) in leaf_of:
            sources.append(("argument", leaf_of[id(leaf)]))
        elif id(leaf) in bound:
            sources.append(("bound", bound[id(leaf)]))
        elif isinstance(leaf, None | int | float | str | bool | torch.dtype | torch.device):
            sources.append(("constant", leaf))
        else:
            raise CompileError(
                f"forward returns a {type(leaf).__module__}.{type(leaf).__qualname__}, which is neither a tensor, a "
                "plain value nor a pytree node. Return tensors in tuples, lists, dicts or dataclasses registered with "
                "torch.utils._pytree."
            )
    return ResultSpec(sources=tuple(sources), tree=tree)


def _trace_error(error: Exception, declared: Mapping[int, Mapping[int, str]]) -> CompileError:
    """Our error for Dynamo's: what happened, where in the user's code, and what to do."""
    text = str(error)
    where = _user_line(error)
    names = sorted({name for dims in declared.values() for name in dims.values()})
    of_size = re.search(r"\bu\d+\b", text) is not None and ".item()" not in text.partition("from user code")[0]
    if of_size and ("data-dependent" in text or "ConstraintViolation" in type(error).__name__ + text):
        specialised = re.search(r"(?:data-dependent expression|guard on|Constraints violated)[^\n]*", text)
        condition = specialised.group(0) if specialised else text.splitlines()[0]
        return SizeSpecialized(
            f"the model's code depends on the value of a dynamic size ({', '.join(names)}){where}: {condition}. "
            "A size declared in dynamic_dims may take any value, so code that branches on it cannot be one graph. "
            "Remove the branch, or leave that dim out of dynamic_dims."
        )
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return GraphBreak(
        f"the model is not one graph{where}: {reason}. piecegraph compiles a model as one graph; rewrite that line "
        "with tensor operations, or wrap it in a custom op (torch.library)."
    )


def _user_line(error: BaseException) -> str:
    """`" at FILE:LINE (CODE)"` of the innermost user frame Dynamo was in, or nothing."""
    stack = getattr(error, "real_stack", None)
    if not stack:
        match = re.findall(r'File "([^"]+)", line (\d+)', str(error))
        return f" at {match[-1][0]}:{match[-1][1]}" if match else ""
    frames = [frame for frame in stack if isinstance(frame, traceback.FrameSummary)]
    outside = [frame for frame in frames if "/torch/" not in frame.filename] or frames
    frame = outside[-1]
    return f" at {frame.filename}:{frame.lineno}" + (f" ({frame.line.strip()})" if frame.line else "")
