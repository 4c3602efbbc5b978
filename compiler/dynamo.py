"""What we ask of Dynamo: one graph of one call, and what it had to assume."""

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

from piecegraph.compiler.torch_compat import name_of_source


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoGraph:
    """What Dynamo made of one call."""

    graph_module: fx.GraphModule
    examples: tuple[Any, ...]  # one a placeholder: the real tensor traced with, or the SymInt
    result: Any  # what the function returned, its computed tensors being the fakes of the graph's outputs
    guards: tuple[Any, ...]  # GuardFilterEntry
    traced_code: tuple[types.CodeType, ...]
    mutations: tuple[str, ...]  # Python objects that live longer than the call and were changed by it


OnGraph = Callable[[fx.GraphModule, Sequence[Any], Sequence[str]], Sequence[Any]]
"""May change a graph before anything is made of it: takes it with the examples of its placeholders, and returns those
it has then. The third are attributes, as `module.Class.name`, of objects older than the call that it changes, also
where they end as they began. If it raises, nothing of the call happens, such changes neither; Dynamo's error is
another."""


def _as_it_is(graph_module: fx.GraphModule, examples: Sequence[Any], changed: Sequence[str]) -> Sequence[Any]:
    return examples


def dynamo_graph(
    function: Callable[..., Any],
    args: Sequence[Any],
    on_graph: OnGraph = lambda graph_module, examples, changed: examples,
) -> DynamoGraph:
    """Trace `function(*args)` to exactly one graph without running any of it.

    The backend hands Dynamo's own bytecode the *fake* outputs of the graph, so the structure of the
    result is built by the code that would build it for real, and no kernel runs. The code object is
    a fresh copy: nothing is looked up in, or left in, Dynamo's cache of the caller's code. Raises
    what Dynamo raises (`torch._dynamo.exc.Unsupported` for a graph break).
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
    )
    try:
        with config, warnings.catch_warnings():
            # transformers caches a few lookups; Dynamo traces through them, which is what is wanted.
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
    """Objects older than the traced call whose attributes or items it changes (Dynamo would replay
    the change after the graph; we run the graph only, so the caller must refuse)."""
    found = []
    for variable, attributes in _modified():
        changed = [name for name, value in attributes.items() if not _is_restored(variable, name, value)]
        if changed or not attributes:
            where = name_of_source(variable.source) if variable.source is not None else type(variable).__name__
            found.append(f"{where} ({', '.join(changed) or 'its items'})")
    return tuple(found)


def _changed_attributes() -> tuple[str, ...]:
    return tuple(
        f"{kind.__module__}.{kind.__qualname__}.{name}"
        for variable, attributes in _modified()
        for kind in [type(getattr(variable, "value", variable))]
        for name in attributes or ("its items",)
    )


def _modified() -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Dynamo's variables of objects older than the traced call that it changes, and the attributes it gives them."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects = InstructionTranslator.current_tx().output.side_effects
    for variable in effects.id_to_variable.values():
        lasting = isinstance(variable.mutation_type, AttributeMutationExisting | ValueMutationExisting)
        if lasting and effects.is_modified(variable):
            yield variable, effects.store_attr_mutations.get(variable, {})


def _is_restored(variable: Any, name: str, value: Any) -> bool:
    """The attribute ends the call as it began it (set and reset, as transformers' output capture does)."""
    owner = getattr(variable, "value", None)
    if owner is None or not value.is_python_constant():
        return False
    missing = object()
    before = getattr(owner, name, missing)
    after = value.as_python_constant()
    return before is after or (type(before) is type(after) and before == after)


def code_being_traced() -> tuple[types.CodeType, ...]:
    """Inside a backend: the code objects of the graph, the outermost first."""
    context = torch._guards.TracingContext.try_get()
    return tuple(context.traced_code) if context is not None else ()


def compiled_by_torch(compiled: Any) -> tuple[torch.nn.Module | None, Callable[..., Any] | None]:
    """The module or the function that `torch.compile` made `compiled` of."""
    if isinstance(compiled, torch._dynamo.OptimizedModule):
        return compiled._orig_mod, None
    if isinstance(compiled, torch.nn.Module) and compiled._compiled_call_impl is not None:  # module.compile()
        return compiled, None
    return None, getattr(compiled, "_torchdynamo_orig_callable", None)


def mark_dynamic_size(tensor: torch.Tensor, dim: int, size_name: str) -> None:
    """Dim `dim` of `tensor` gets a symbol no guard can specialise, shared by all dims of that name."""
    torch._dynamo.decorators.mark_unbacked(tensor, dim, shape_id=size_name)


def guard_name(entry: Any) -> str:
    """The expression guarded, e.g. `mod._modules['embed'].training`."""
    return str(entry.name)
