"""The only file that knows torch versions and torch's private names.

Checked against torch 2.11 and 2.13. Every function here is small: it does one thing to torch and
returns plain values, so that the rest of the compiler reads as if torch had a stable surface.
"""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._guards
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import Node

# -- one graph from Dynamo ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoGraph:
    """What Dynamo made of one call."""

    graph_module: fx.GraphModule
    examples: tuple[Any, ...]  # one a placeholder: the real tensor traced with, or the SymInt
    result: Any  # what the function returned, its computed tensors being the fakes of the graph's outputs
    guards: tuple[Any, ...]  # GuardFilterEntry
    traced_code: tuple[types.CodeType, ...]
    mutations: tuple[str, ...]  # Python objects that live longer than the call and were changed by it


def dynamo_graph(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> DynamoGraph:
    """Trace `function(*args, **kwargs)` to exactly one graph without running any of it.

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
        captured.update(graph=gm, examples=tuple(examples), code=tuple(context.traced_code))
        captured["mutations"] = _lasting_mutations()
        output = next(iter(reversed(gm.graph.nodes)))
        fakes = [node.meta["example_value"] if isinstance(node, Node) else node for node in output.args[0]]
        return lambda *_: fakes

    def drop_guards(entries: Sequence[Any]) -> list[bool]:
        guards.extend(entries)
        return [False] * len(entries)

    code = function.__code__.replace(co_name="piecegraph_trace")
    fresh = types.FunctionType(code, function.__globals__, "piecegraph_trace", function.__defaults__, function.__closure__)
    config = torch._dynamo.config.patch(
        automatic_dynamic_shapes=False,  # the caller declares what is dynamic
        assume_static_by_default=True,
        specialize_float=True,
        suppress_errors=False,
    )
    try:
        with config:
            optimize = torch._dynamo.optimize(capture, nopython=True, guard_filter_fn=drop_guards)
            result = optimize(fresh)(*args, **kwargs)
    finally:
        torch._dynamo.reset_code(code)
    if "graph" not in captured:
        return DynamoGraph(
            graph_module=fx.GraphModule({}, fx.Graph()), examples=(), result=result, guards=(), traced_code=(), mutations=()
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
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects = InstructionTranslator.current_tx().output.side_effects
    found = []
    for variable in effects.id_to_variable.values():
        lasting = isinstance(variable.mutation_type, AttributeMutationExisting | ValueMutationExisting)
        if not lasting or not effects.is_modified(variable):
            continue
        attributes = effects.store_attr_mutations.get(variable, {})
        changed = [name for name, value in attributes.items() if not _is_restored(variable, name, value)]
        if changed or not attributes:
            where = variable.source.name if variable.source is not None else type(variable).__name__
            where = where() if callable(where) else where  # a method before torch 2.12
            found.append(f"{where} ({', '.join(changed) or 'its items'})")
    return tuple(found)


def _is_restored(variable: Any, name: str, value: Any) -> bool:
    """The attribute ends the call as it began it (set and reset, as transformers' output capture does)."""
    owner = getattr(variable, "value", None)
    if owner is None or not value.is_python_constant():
        return False
    missing = object()
    before = getattr(owner, name, missing)
    after = value.as_python_constant()
    return before is after or (type(before) is type(after) and before == after)


def mark_dynamic_size(tensor: torch.Tensor, dim: int, size_name: str) -> None:
    """Dim `dim` of `tensor` gets a symbol no guard can specialise, shared by all dims of that name."""
    torch._dynamo.decorators.mark_unbacked(tensor, dim, shape_id=size_name)


def guard_name(entry: Any) -> str:
    """The expression guarded, e.g. `mod._modules['embed'].training`."""
    return str(entry.name)


# -- symbolic sizes -----------------------------------------------------------------------------


def shape_env_of(values: Sequence[Any]) -> ShapeEnv | None:
    """The shape environment of the first symbolic or fake value among `values`."""
    for value in values:
        if isinstance(value, torch.SymInt):
            return value.node.shape_env
        mode = getattr(value, "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return mode.shape_env
    return None


def symbol_range(shape_env: ShapeEnv | None, symbol: Any) -> str:
    """The values `symbol` may take, as text: part of a piece's key."""
    bounds = shape_env.var_to_range.get(symbol) if shape_env is not None else None
    return f"[{bounds.lower}, {bounds.upper}]" if bounds is not None else "?"


def specialised_at(shape_env: ShapeEnv | None) -> str:
    """`" by FILE:LINE (CODE)"` of the last line of the traced code that fixed a symbol, or nothing."""
    if shape_env is None:
        return ""
    for location in reversed(list(getattr(shape_env, "replacements_slocs", {}).values())):
        user = getattr(location, "user_loc", None) or getattr(location, "framework_loc", None)
        if user is not None:
            return f" by {str(user).strip()}"
    return ""


# -- Inductor -----------------------------------------------------------------------------------

_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_environment_lock = threading.RLock()


@contextlib.contextmanager
def inductor_cache_dir(directory: Path) -> Iterator[None]:
    """Inductor's and Triton's own caches live in `directory` inside this block, and the process's
    settings are as before after it. One thread at a time: the variables are the process's."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in _CACHE_VARIABLES}
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
        os.environ["TRITON_CACHE_DIR"] = str(directory / "triton")
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def unknown_inductor_options(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Names in `options` that are no `torch._inductor.config` field."""
    from torch._inductor import config

    known = config.get_config_copy()
    return tuple(name for name in options if name not in known)


def inductor_option_names() -> list[str]:
    from torch._inductor import config

    return list(config.get_config_copy())


def standalone_compile(graph_module: fx.GraphModule, examples: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Compile one piece for the sizes of its own placeholders; a `CompiledArtifact`."""
    import torch._inductor

    with torch.no_grad():
        return torch._inductor.standalone_compile(
            graph_module, list(examples), dynamic_shapes="from_graph", options={"config_patches": dict(options)}
        )


def load_artifact(path: Path) -> Any:
    """A `CompiledArtifact` that `artifact.save(path=..., format="binary")` wrote. Unpickles: trusted files only."""
    from torch._inductor import CompiledArtifact

    with torch.no_grad():
        return CompiledArtifact.load(path=str(path), format="binary")


def generated_kernels() -> int:
    """Kernels Inductor generated in this process so far (cache hits count as well)."""
    from torch._inductor import metrics

    return int(metrics.generated_kernel_count)


def pickle_graph(graph_module: fx.GraphModule) -> bytes:
    """A graph with its fake tensors and symbols, for a process of ours to compile."""
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(graph_module, Options(ops_filter=None))


def unpickle_graph(data: bytes) -> fx.GraphModule:
    """The graph `pickle_graph` wrote, in a fake mode and a shape environment of its own."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler

    graph_module = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    assert isinstance(graph_module, fx.GraphModule)
    return graph_module


# -- logs ---------------------------------------------------------------------------------------


def emit_artifact(name: str, text: str) -> None:
    """`text` appears under `name` in torch's structured trace (tlparse), where one is being written."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)
