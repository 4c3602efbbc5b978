"""Trace a call of a module to one FX graph, every input of which is accounted for."""

from __future__ import annotations

import ast
import contextlib
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

from piecegraph.compiler.repeated_layers.expand import (
    NotRepeatable,
    check_changed_attributes,
    check_guarded_identities,
    check_guarded_places,
    expand_repeated_layers,
    summarize_copies,
)
from piecegraph.compiler.repeated_layers.find import LayerKind, find_layer_lists
from piecegraph.compiler.repeated_layers.markers import RETURNS_PAIR, mark_layers
from piecegraph.compiler.tracing.dynamic_dims import DynamicDims
from piecegraph.compiler.tracing.dynamo import (
    DynamoError,
    DynamoGraph,
    dynamo_graph,
    guard_name,
    mark_dynamic_size,
    source_of_placeholder,
)
from piecegraph.compiler.tracing.guards import GuardAudit, audit_guards
from piecegraph.compiler.tracing.python_kernels import called_ops, own_functions
from piecegraph.compiler.tracing.signature import (
    NEGATED,
    ArgumentInput,
    BoundInput,
    CallSpec,
    ExampleCall,
    GraphInput,
    Interface,
    ResultSpec,
    SizeInput,
)
from piecegraph.compiler.tracing.traced_reads import TracedReads, traced_reads
from piecegraph.compiler.tracing.traced_sources import digests_of_files, files_of_code
from piecegraph.errors import CompileError, GraphBreak, SizeSpecialized


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """One traced graph, with the meaning of each of its placeholders and outputs."""

    graph_module: fx.GraphModule
    inputs: tuple[GraphInput, ...]  # one a placeholder, in order
    size_symbols: dict[str, str]  # symbol in the graph -> size name
    call_spec: CallSpec
    result_spec: ResultSpec
    guards: GuardAudit
    sources: Mapping[str, str | None]  # file of every function traced -> sha256; None: it cannot be read
    reads: TracedReads
    seconds: float
    note: str = ""  # how layers were traced

    @property
    def interface(self) -> Interface:
        """The part of this trace that a call needs."""
        return Interface(
            call_spec=self.call_spec,
            result_spec=self.result_spec,
            arguments=tuple(each for each in self.inputs if not isinstance(each, BoundInput)),
            size_symbols=self.size_symbols,
            read_guards=lambda: self.guards,
        )


def trace(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_dims: DynamicDims) -> Traced:
    """Trace `module(*args, **kwargs)` to one graph, for every size of the declared dims.

    The caller's tensors are not touched: tracing marks copies. Raises `GraphBreak` (naming the line),
    `SizeSpecialized` (naming the condition), `UnknownGuard`, and the errors of `ExampleCall.of`. Declared sizes are
    at least 1; where the code asks whether a size is 1 (`q_length > 1`) and the examples have more, that size is at
    least 2, and calls are checked for it.
    """
    given = ExampleCall.of(module, args, kwargs, dynamic_dims)
    try:
        return _trace(module, args, kwargs, dynamic_dims, frozenset())
    except SizeSpecialized as error:
        several = _names_of_larger_sizes(given)
        if not several or not _ASKS_FOR_ONE.search(str(error)):
            raise
        tries = list(dict.fromkeys([*(frozenset([name]) for name in several), frozenset(several)]))
        for names in tries:
            with contextlib.suppress(SizeSpecialized):
                return _trace(module, args, kwargs, dynamic_dims, names)
        raise


_ASKS_FOR_ONE = re.compile(r"\bu\d+ (?:> 1|>= 2|<= 1|< 2)\b|\b(?:1 <|2 <=|1 >=|2 >) u\d+\b|\b(?:Eq|Ne)\(u\d+, 1\)")
"""A pattern for conditions in the message of `SizeSpecialized` that ask whether a size is 1."""


def _names_of_larger_sizes(given: ExampleCall) -> tuple[str, ...]:
    """Return the names of declared sizes that are more than 1 in the examples."""
    sizes = {name: given.leaves[leaf].shape[dim] for leaf, dims in given.declared.items() for dim, name in dims.items()}
    return tuple(name for name, size in sizes.items() if size > 1)


def _trace(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_dims: DynamicDims,
    at_least_two: frozenset[str],
) -> Traced:
    """Trace as `trace` does, with the sizes named in `at_least_two` at least 2."""
    start = time.perf_counter()
    given = ExampleCall.of(module, args, kwargs, dynamic_dims)
    declared = given.declared
    examples = [_marked_copy(leaf, declared.get(index, {})) for index, leaf in enumerate(given.leaves)]
    bound = inspect.BoundArguments(given.call_spec.signature, OrderedDict(pytree.tree_unflatten(examples, given.tree)))

    sized = tuple(
        (examples[index], dim, 2 if name in at_least_two else 1)
        for index, dims in declared.items()
        for dim, name in dims.items()
    )

    def call(args: Any, kwargs: Any, sized: tuple[tuple[torch.Tensor, int, int], ...]) -> Any:
        for tensor, dim, least in sized:
            torch._check(tensor.shape[dim] >= least)  # torch's own attention asks whether a size is 0
        return module(*args, **kwargs)

    try:
        with torch.no_grad():
            graph, note = _graph(call, (bound.args, bound.kwargs, sized), module)
    except DynamoError as error:
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
    roots = {"args": bound.args, "kwargs": bound.kwargs, "sized": sized}
    inputs, symbols = _graph_inputs(graph, module, examples, given.paths, declared, roots)
    sources = [each.source for each in inputs if isinstance(each, BoundInput) and each.source]
    reads = traced_reads(
        graph.guards,
        sources,
        module,
        graph.traced_code,
        called_ops(graph.graph_module),
        own_functions(graph.graph_module),
    )
    return Traced(
        graph_module=graph.graph_module,
        inputs=inputs,
        size_symbols=symbols,
        call_spec=given.call_spec,
        result_spec=_result_spec(graph, examples),
        guards=_audited(graph),
        sources=digests_of_files({*files_of_code(graph.traced_code), *reads.files}),
        reads=reads,
        seconds=time.perf_counter() - start,
        note=note,
    )


def _marked_graph(
    call: Callable[..., Any],
    args: Sequence[Any],
    kinds: Sequence[LayerKind],
    on_graph: Callable[[fx.GraphModule, Sequence[Any], Sequence[str]], Sequence[Any]],
) -> DynamoGraph:
    """Return the graph of a call, with markers for layers of `kinds`, which return tensors, or pairs with None."""
    try:
        with mark_layers(kinds):
            return dynamo_graph(call, args, on_graph)
    except Exception as error:  # Dynamo's, for the marker's own
        if RETURNS_PAIR not in str(error):
            raise
    with mark_layers(kinds, is_pair=True):
        return dynamo_graph(call, args, on_graph)


def _graph(call: Callable[..., Any], args: Sequence[Any], module: nn.Module) -> tuple[DynamoGraph, str]:
    """Return the graph of a call of `module`, and a note on its layers.

    Most layers that are alike are copies of the first (Note [what a copy cannot know]).
    """
    try:
        lists = find_layer_lists(module)
    except Exception as error:  # an attribute of a module may raise anything
        return dynamo_graph(call, args), f"every layer was traced: {_first_line(error)}"
    kinds = [kind for each in lists for kind in each.kinds if kind.middle]
    if not kinds:
        return dynamo_graph(call, args), ""
    refused: list[NotRepeatable] = []

    def on_graph(graph_module: fx.GraphModule, examples: Sequence[Any], changed: Sequence[str]) -> Sequence[Any]:
        try:
            check_changed_attributes(changed)
            return expand_repeated_layers(graph_module, examples, lists)
        except NotRepeatable as error:
            refused.append(error)
            raise

    try:
        graph = _marked_graph(call, args, kinds, on_graph)
        check_guarded_places(map(guard_name, graph.guards), kinds)
        check_guarded_identities(graph.guards, kinds)
        _audited(graph)
    except Exception as error:  # the model's own errors are raised again below
        own = RETURNS_PAIR if RETURNS_PAIR in str(error) else _first_line(error)
        why = next(map(str, refused), "") or (str(error) if isinstance(error, NotRepeatable) else own)
        return dynamo_graph(call, args), f"every layer was traced: {why}"
    return graph, summarize_copies(kinds)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _audited(graph: DynamoGraph) -> GuardAudit:
    return audit_guards([(entry.guard_type, guard_name(entry)) for entry in graph.guards])


def _marked_copy(leaf: Any, dims: Mapping[int, str]) -> Any:
    """Return a copy of an example tensor with its declared dims marked dynamic, and any other leaf unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = [int(size) for size in leaf.shape]
    if leaf.is_contiguous():  # a dim of one may have any stride, which Dynamo would take for a size
        copy = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
    else:
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
    roots: Mapping[str, Any],
) -> tuple[tuple[GraphInput, ...], dict[str, str]]:
    """Return the meaning of each placeholder, and the size name of each symbol.

    `roots` are the local variables of the traced call: Dynamo names by them a size of a tensor that is no placeholder,
    because the graph does not read it.
    """
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
                source = source_of_placeholder(node) if kind == "constant" else ""
                if example.is_neg():
                    raise CompileError(f"the {kind} {name} is {NEGATED}. Store what its .resolve_neg() returns.")
                inputs.append(BoundInput(name, kind, example, source=source))
            continue
        symbol = str(example.node.expr) if isinstance(example, torch.SymInt) else ""
        if symbol and symbol not in places:
            tensor, dim = _tensor_and_dim(source_of_placeholder(node), roots)
            leaf = leaf_of.get(id(tensor))
            if leaf is not None and dim in declared.get(leaf, {}):
                symbols[symbol], places[symbol] = declared[leaf][dim], (leaf, dim)
        if symbol in places:
            inputs.append(SizeInput(symbols[symbol], *places[symbol]))
        else:
            raise CompileError(
                f"the traced graph has an input {node.name} = {example!r} that is neither a tensor nor a declared "
                "size. Declare the dim it comes from in dynamic_dims, or pass the value as a tensor."
            )
    return tuple(inputs), symbols


def _tensor_and_dim(expression: str, roots: Mapping[str, Any]) -> tuple[Any, int]:
    """Return what Dynamo's expression `L['args'][1].size()[0]` names: the tensor and the dim; (None, 0) for any other.

    The expression is parsed and never evaluated.
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str(name))):
                return roots[name]
            case ast.Subscript(value=owner, slice=ast.Constant(value=key)):
                return value(owner)[key]
            case ast.Attribute(value=owner, attr=name):
                return getattr(value(owner), name)
        raise LookupError

    match ast.parse(expression or "None", mode="eval").body:
        case ast.Subscript(
            value=ast.Call(func=ast.Attribute(value=owner, attr="size")), slice=ast.Constant(value=int(dim))
        ):
            with contextlib.suppress(LookupError, AttributeError, TypeError):
                return value(owner), dim
    return None, 0


def _line_that_fixes(placeholder: fx.Node, size: Any) -> str:
    """Return `" at FILE:LINE (CODE)"` of the operation that probably fixed a size; "" where Dynamo kept no line.

    That is the first operation that writes the size as a number, else the first that reads the tensor.
    """
    operations = [node for node in placeholder.graph.nodes if node.op in ("call_function", "call_method")]
    writes = [node for node in operations if int(size) in pytree.tree_leaves((node.args, node.kwargs))]
    for node in (*writes, *placeholder.users):
        lines = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*(.+)', node.meta.get("stack_trace") or "")
        outside = [found for found in lines if found[0] != __file__]
        if outside:
            file, line, code = outside[-1]
            return f" at {file}:{line} ({code.strip()})"
    return ""


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
        elif isinstance(leaf, torch.Tensor):
            raise CompileError(
                f"forward returns a tensor of shape {tuple(leaf.shape)} that its graph does not compute, such as a "
                "parameter or a buffer that nothing else reads. Return a copy (tensor.clone()), or read it from the "
                "module."
            )
        else:
            raise CompileError(
                f"forward returns a {type(leaf).__module__}.{type(leaf).__qualname__}, which is neither a tensor, a "
                "plain value nor a pytree node. Return tensors in tuples, lists, dicts or dataclasses registered with "
                "torch.utils._pytree."
            )
    return ResultSpec(sources=tuple(sources), tree=tree)


def _trace_error(error: Exception, declared: Mapping[int, Mapping[int, str]]) -> CompileError:
    """Return our error for one of Dynamo's: what happened, where in the user's code, and what to do."""
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
    """Return `" at FILE:LINE (CODE)"` of the innermost user frame Dynamo was in, or ""."""
    stack = getattr(error, "real_stack", None)
    if not stack:
        match = re.findall(r'File "([^"]+)", line (\d+)', str(error))
        return f" at {match[-1][0]}:{match[-1][1]}" if match else ""
    frames = [frame for frame in stack if isinstance(frame, traceback.FrameSummary)]
    outside = [frame for frame in frames if "/torch/" not in frame.filename] or frames
    frame = outside[-1]
    return f" at {frame.filename}:{frame.lineno}" + (f" ({frame.line.strip()})" if frame.line else "")
