"""The interface to Dynamo: one graph of one call, with the guards it depends on."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch._guards
from torch import fx
from torch.fx.node import Node

from piecegraph.compiler.torch_compat.versions import (
    guard_missing_attributes,
    guard_standard_library,
    source_name,
    undecided_layouts_are_contiguous,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoGraph:
    """The graph that Dynamo made of one call, with everything it found."""

    graph_module: fx.GraphModule
    examples: tuple[Any, ...]  # one a placeholder: the real tensor traced with, or the SymInt
    result: Any  # the function's result, in which computed tensors are the fakes of the graph's outputs
    guards: tuple[Any, ...]  # GuardFilterEntry
    traced_code: tuple[types.CodeType, ...]
    mutations: tuple[str, ...]  # Python objects older than the call that it changes


DynamoError = torch._dynamo.exc.TorchDynamoException
"""The class of the errors that Dynamo raises."""

OnGraph = Callable[[fx.GraphModule, Sequence[Any], Sequence[str]], Sequence[Any]]
"""A hook that may change a graph before it is used.

It takes the graph, the examples of its placeholders, and the attributes (as `module.Class.name`) of objects older than
the call that the call changes, even where they end with the value they had. It returns the examples of the
placeholders that the graph has then. If the hook raises, the call and its changes do not happen, and Dynamo raises an
error of its own.
"""


def dynamo_graph(
    function: Callable[..., Any],
    args: Sequence[Any],
    on_graph: OnGraph = lambda graph_module, examples, changed: examples,
) -> DynamoGraph:
    """Trace `function(*args)` to exactly one graph without running any of it.

    The backend hands Dynamo's own bytecode the *fake* outputs of the graph, so the structure of the
    result is built by the code that would build it for real, and no kernel runs. The code object is
    a fresh copy: nothing is looked up in, or left in, Dynamo's cache of the caller's code. Raises
    Dynamo's errors (`torch._dynamo.exc.Unsupported` for a graph break).
    """
    captured: dict[str, Any] = {}
    guards: list[Any] = []

    def capture(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        assert "graph" not in captured, "fullgraph tracing called its backend twice"
        context = torch._guards.TracingContext.get()
        examples = tuple(on_graph(gm, examples, _changed_attributes()))
        captured.update(graph=gm, examples=examples, code=tuple(context.traced_code))
        captured["mutations"] = _lasting_mutations()
        output = next(iter(reversed(gm.graph.nodes)))
        fakes = [node.meta["example_value"] if isinstance(node, Node) else node for node in output.args[0]]
        return lambda *_: fakes

    def drop_guards(entries: Sequence[Any]) -> list[bool]:
        guards.extend(entries)
        return [False] * len(entries)

    assert isinstance(function, types.FunctionType), "a plain function is traced"
    code = function.__code__.replace(co_name="piecegraph_trace")
    fresh = types.FunctionType(
        code, function.__globals__, "piecegraph_trace", function.__defaults__, function.__closure__
    )
    config = torch._dynamo.config.patch(
        automatic_dynamic_shapes=False,  # the caller declares what is dynamic
        assume_static_by_default=True,
        specialize_float=True,
        suppress_errors=False,
        use_numpy_random_stream=True,  # or torch's numbers stand for those of numpy.random, whatever its seed
    )
    try:
        with (
            config,
            warnings.catch_warnings(),
            guard_standard_library(),
            guard_missing_attributes(),
            undecided_layouts_are_contiguous(),
        ):
            # transformers caches a few lookups; Dynamo traces through them, as it should.
            warnings.filterwarnings("ignore", message=".*lru_cache.*", category=UserWarning)
            optimize = torch._dynamo.optimize(capture, nopython=True, guard_filter_fn=drop_guards)
            result = optimize(fresh)(*args)
    finally:
        torch._dynamo.reset_code(code)
    if "graph" not in captured:
        return DynamoGraph(
            graph_module=fx.GraphModule({}, fx.Graph()),
            examples=(),
            result=result,
            guards=(),
            traced_code=(),
            mutations=(),
        )
    return DynamoGraph(
        graph_module=captured["graph"],
        examples=captured["examples"],
        result=result,
        guards=tuple(guards),
        traced_code=captured["code"],
        mutations=captured["mutations"],
    )


def _lasting_mutations() -> tuple[str, ...]:
    """List objects older than the traced call whose attributes or items it changes.

    Dynamo would replay the change after the graph; we run the graph only, so the caller must refuse.
    """
    found = []
    for variable, attributes in _modified():
        if _is_collector_of_outputs(variable):
            continue
        changed = [name for name, value in attributes.items() if not _is_restored(variable, name, value)]
        if changed or not attributes:
            where = source_name(variable.source) if variable.source is not None else type(variable).__name__
            found.append(f"{where} ({', '.join(changed) or 'its items'})")
    if _draws_random_numbers():
        found.append("the random numbers of Python (random.randint or alike)")
    return tuple(found)


def _is_collector_of_outputs(variable: Any) -> bool:
    """Return whether it is what each forward of transformers sets and resets.

    Another thread's forward may have set it while this one is traced, so its values are not those from before.
    """
    kind = type(getattr(variable, "value", None))
    return (kind.__module__, kind.__qualname__) == ("transformers.utils.output_capturing", "CompileableContextVar")


def drawn_from_objects() -> tuple[str, ...]:
    """Return the expressions of the `random.Random` objects older than the traced call that it draws from.

    Dynamo keeps the state that such an object had while tracing, and draws from that state before each call.
    """
    from torch._dynamo.variables.misc import RandomVariable

    drawn = [variable for variable, _ in _modified() if isinstance(variable, RandomVariable)]
    return tuple(source_name(each.source) if each.source is not None else "random.Random" for each in drawn)


def _draws_random_numbers() -> bool:
    """Return whether the traced call draws from `random`, which Dynamo's bytecode would do before each graph."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(InstructionTranslator.current_tx().output.random_calls)


def _changed_attributes() -> tuple[str, ...]:
    """List the attributes that the traced call changes, as `module.Class.name`."""
    return tuple(
        f"{kind.__module__}.{kind.__qualname__}.{name}"
        for variable, attributes in _modified()
        for kind in [type(getattr(variable, "value", variable))]
        for name in attributes or ("its items",)
    )


def _modified() -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield Dynamo's variable of each object older than the traced call that it changes, and the changed attributes."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
    from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable

    effects = InstructionTranslator.current_tx().output.side_effects
    for variable in effects.id_to_variable.values():
        lasting = isinstance(variable.mutation_type, AttributeMutationExisting | ValueMutationExisting)
        if isinstance(variable, TorchFunctionModeStackVariable):  # restored where a `with` of the call ends
            continue
        if lasting and effects.is_modified(variable):
            yield variable, effects.store_attr_mutations.get(variable, {})


def _is_restored(variable: Any, name: str, value: Any) -> bool:
    """Return whether an attribute ends the call with the value it had (as transformers' output capture resets it)."""
    owner = getattr(variable, "value", None)
    if owner is None or not value.is_python_constant():
        return False
    missing = object()
    before = getattr(owner, name, missing)
    after = value.as_python_constant()
    return before is after or (type(before) is type(after) and before == after)


def code_being_traced() -> tuple[types.CodeType, ...]:
    """Return the code objects of the graph being traced, the outermost first. The caller is inside a backend."""
    context = torch._guards.TracingContext.try_get()
    return tuple(context.traced_code) if context is not None else ()


def compiled_by_torch(compiled: Any) -> tuple[torch.nn.Module | None, Callable[..., Any] | None]:
    """Return the module, or else the function, from which `torch.compile` made `compiled`."""
    if isinstance(compiled, torch._dynamo.OptimizedModule):
        return compiled._orig_mod, None
    if isinstance(compiled, torch.nn.Module) and compiled._compiled_call_impl is not None:  # module.compile()
        return compiled, None
    return None, getattr(compiled, "_torchdynamo_orig_callable", None)


def mark_dynamic_size(tensor: torch.Tensor, dim: int, size_name: str) -> None:
    """Give a dim of `tensor` an unbacked symbol, which no guard can specialise and all dims of that name share."""
    torch._dynamo.decorators.mark_unbacked(tensor, dim, shape_id=size_name)


def guard_name(entry: Any) -> str:
    """Return the guarded expression, e.g. `mod._modules['embed'].training`."""
    return str(entry.name)


def source_of_placeholder(node: fx.Node) -> str:
    """Return the expression by which Dynamo found the value of a placeholder; "" where it recorded none."""
    source = getattr(node, "_dynamo_source", None)
    return source_name(source) if source is not None else ""
