"""The only file that knows torch versions and torch's private names.

Checked against torch 2.11 and 2.13. Every function here is small: it does one thing to torch and
returns plain values, so that the rest of the compiler reads as if torch had a stable surface.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import operator
import os
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo
import torch._guards
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
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


def dynamo_graph(function: Callable[..., Any], args: Sequence[Any]) -> DynamoGraph:
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
        captured.update(graph=gm, examples=tuple(examples), code=tuple(context.traced_code))
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


def dispatcher_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """What calling an op overload calls, without the Python frame in between; anything else as it is."""
    return function._op if type(function) is torch._ops.OpOverload else function


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
    """The values `symbol` may take, and one it has where torch has an example, as text: part of a piece's key."""
    bounds = shape_env.var_to_range.get(symbol) if shape_env is not None else None
    if shape_env is None or bounds is None:
        return "?"
    hint = symbol_facts(shape_env, symbol)["hint"]
    return f"[{bounds.lower}, {bounds.upper}]" + (f", such as {hint}" if hint is not None else "")


def symbol_facts(shape_env: ShapeEnv | None, symbol: Any) -> dict[str, Any]:
    """Name, range and, for a size torch has an example of, the example: enough to make it again."""
    assert shape_env is not None, f"{symbol} belongs to no shape environment"
    bounds = shape_env.var_to_range.get(symbol)
    lower = int(bounds.lower) if bounds is not None and bounds.lower.is_Integer else 0
    upper = int(bounds.upper) if bounds is not None and bounds.upper.is_Integer else None
    hint = None
    if not shape_env.is_unbacked_symint(symbol):
        hints = shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val
        hint = int(hints[symbol])
    return {"name": str(symbol), "lower": max(lower, 0), "upper": upper, "hint": hint}


def size_ranges(values: Sequence[Any]) -> dict[str, tuple[int, int | None]]:
    """Least and greatest value (None: unbounded) of every symbol in the sizes of `values`, by name."""
    shape_env = shape_env_of(values)
    ranges = {}
    for value in values:
        for size in (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,):
            for symbol in size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ():
                facts = symbol_facts(shape_env, symbol)
                ranges[str(symbol)] = (facts["lower"], facts["upper"])
    return ranges


def size_at(size: int | torch.SymInt, value: int) -> int:
    """A size where every symbol is `value`."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, value)))


def fresh_fake_mode() -> FakeTensorMode:
    """A fake mode with a shape environment of its own."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)


def make_symbols(fake_mode: FakeTensorMode, facts: Sequence[Mapping[str, Any]]) -> dict[str, torch.SymInt]:
    """One symbolic size per `symbol_facts`, by name: unbacked where there is no hint."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, _constrain_range_for_size

    shape_env = fake_mode.shape_env
    assert shape_env is not None
    symbols = {}
    for fact in facts:
        if fact["hint"] is None:
            with shape_env.ignore_fresh_unbacked_symbols():  # no node makes it: it comes in
                size = shape_env.create_unbacked_symint()
            _constrain_range_for_size(size, min=fact["lower"], max=fact["upper"])
        else:
            source = ConstantSource(fact["name"])
            symbol = shape_env.create_symbol(fact["hint"], source=source, dynamic_dim=DimDynamic.DYNAMIC)
            size = cast(torch.SymInt, shape_env.create_symintnode(symbol, hint=fact["hint"], source=source))
        symbols[fact["name"]] = size
    return symbols


_SIZE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


def evaluate_size(expression: str, symbols: Mapping[str, torch.SymInt | int]) -> torch.SymInt | int:
    """The size that `expression`, written by sympy, means over `symbols`. Our own data only: it is evaluated."""
    size: torch.SymInt | int = eval(expression, {"__builtins__": {}}, {**_SIZE_FUNCTIONS, **symbols})
    return size


def fake_tensor(
    fake_mode: FakeTensorMode,
    *,
    shape: Sequence[Any],
    stride: Sequence[Any],
    offset: Any,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A tensor without memory."""
    with fake_mode:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return tensor if isinstance(offset, int) and offset == 0 else tensor.as_strided(shape, stride, offset)


def propagate_fakes(graph_module: fx.GraphModule, examples: Sequence[Any], fake_mode: FakeTensorMode) -> None:
    """Give every node its example value, as Dynamo's own graphs have it."""

    class Propagate(fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if n.op != "output":
                n.meta["example_value"] = value
            return value

    with fake_mode, enable_python_dispatcher(), torch.no_grad():
        Propagate(graph_module).run(*examples)


@contextlib.contextmanager
def computing_on_fakes(values: Sequence[Any]) -> Iterator[None]:
    """Inside this block torch computes on fake tensors like those among `values`, tensors made anew included."""
    modes = (getattr(value, "fake_mode", None) for value in values)
    mode = next((mode for mode in modes if mode is not None), None)
    with mode or contextlib.nullcontext(), enable_python_dispatcher(), torch.no_grad():
        yield


def computed_value(node: Node, value_key: str) -> Any:
    """What a call computes of the values its arguments have under `value_key`. Inside `computing_on_fakes`."""

    def value_of(read: Node) -> Any:
        if read.op == "get_attr" and value_key not in read.meta:
            return operator.attrgetter(str(read.target))(read.graph.owning_module)
        return read.meta[value_key]

    args, kwargs = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert node.op == "call_function" and callable(node.target), node.op
    return node.target(*args, **kwargs)


def is_same_layout(one: Any, other: Any) -> bool:
    """Values of a graph that a reader cannot tell apart: dtype, device, sizes, strides and offset."""
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(is_same_layout, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.device != other.device:
            return False
        if one.dim() != other.dim():
            return False
        layouts = ((*t.shape, *t.stride(), t.storage_offset()) for t in (one, other))
        return all(_expression(a) == _expression(b) for a, b in zip(*layouts, strict=True))
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(_expression(one) == _expression(other))
    return one is None and other is None


def _expression(size: int | torch.SymInt) -> Any:
    """To compare without a guard."""
    return size if isinstance(size, int) else size.node.expr


def qualified_name(function: Any) -> str:
    """The dotted name FX writes for a function: importable, where the function can be imported at all."""
    from torch.fx.node import _get_qualified_name

    if isinstance(function, torch._ops.OpOverloadPacket):
        return f"torch.ops.{str(function._qualified_op_name).replace('::', '.')}"
    return _get_qualified_name(function)


# -- Inductor -----------------------------------------------------------------------------------

_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_environment_lock = threading.RLock()


@contextlib.contextmanager
def inductor_cache_dir(directory: Path, triton: Path) -> Iterator[None]:
    """Inductor's and Triton's own caches live in these folders inside this block, and the process's
    settings are as before after it. One thread at a time: the variables are the process's."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in _CACHE_VARIABLES}
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
        os.environ["TRITON_CACHE_DIR"] = str(triton)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def child_environment(cache_dir: Path, triton: Path) -> dict[str, str]:
    """This process's environment for a child that compiles: same import path, Inductor's and Triton's
    caches in these folders."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir),
        "TRITON_CACHE_DIR": str(triton),
    }


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


POST_GRAD_OPTION = "post_grad_custom_post_pass"


def custom_graph_pass(function: Callable[[fx.Graph], None], uuid: str) -> Any:
    """What `POST_GRAD_OPTION` takes: Inductor calls `function` on its graph after its own passes, and `uuid` is
    part of its cache's key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Call(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            function(graph)

        def uuid(self) -> str:
            return uuid

    return Call()


_TUNED_AT_FIRST_RUN = {
    # standalone_compile would measure kernels while it compiles, on random inputs, in processes side by side.
    "triton.autotune_at_compile_time": False,
    # torch 2.11 bundles such a kernel with the configuration it had before it was tuned and, where that was the
    # only one, never looks for what tuning found: every process would tune anew.
    "use_static_cuda_launcher": False,
}

_TUNED_AT_COMPILE_TIME = (
    "max_autotune",
    "max_autotune_gemm",
    "benchmark_fusion",
    "benchmark_combo_kernel",
    "triton.autotune_at_compile_time",
)


def tuned_at_first_run() -> dict[str, Any]:
    """Inductor options under which kernels are measured when they first run, and found tuned after that."""
    from torch._inductor import config

    known = config.get_config_copy()
    return {name: value for name, value in _TUNED_AT_FIRST_RUN.items() if name in known}


def is_tuned_at_compile_time(options: Mapping[str, Any]) -> bool:
    """Inductor measures kernels while it compiles with these options."""
    from torch._inductor import config

    known = {**config.get_config_copy(), **options}
    return any(known.get(name) for name in _TUNED_AT_COMPILE_TIME)


@contextlib.contextmanager
def no_compile_workers() -> Iterator[None]:
    """Inside this block Inductor starts no processes in which to compile kernels."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


def asks_dynamo_to_trace_again(error: Exception) -> bool:
    """Not a failure: Inductor wants the graph traced with some float as a constant, and Dynamo waits for this."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    return isinstance(error, TensorifyScalarRestartAnalysis)


def artifact_bytes(compiled: Any) -> bytes | None:
    """What `load_artifact` takes, of what `standalone_compile` returned; None where torch can save none of it."""
    with tempfile.TemporaryDirectory(prefix="piecegraph-") as folder:
        path = Path(folder) / "artifact"
        try:
            compiled.save(path=str(path), format="binary")
        except (RuntimeError, AssertionError):
            return None
        return path.read_bytes()


def import_loader() -> float:
    """Import what `load_artifact` and every artifact import; the seconds it took. More than a second, the first time:
    generated code reaches for its library calls through the module that holds Inductor's templates."""
    begin = time.perf_counter()
    importlib.import_module("torch._functorch._aot_autograd.autograd_cache")
    importlib.import_module("torch._inductor.compile_fx")
    return time.perf_counter() - begin


def load_artifact(data: bytes) -> Any:
    """The piece that `artifact.save(path=..., format="binary")` wrote. Unpickles: bytes that were authenticated, or
    that a process of ours has just made. Inside `inductor_cache_dir`.

    torch would compare its own sources with those it was made from, which takes most of the time of a load; whoever
    calls this knows them to be the same build.
    """
    from torch.utils._appending_byte_serializer import BytesReader

    artifacts = importlib.import_module("torch._inductor.standalone_compile").CacheCompiledArtifact
    reader = BytesReader(data)
    header = reader.read_bytes()
    assert header == artifacts.CACHE_HEADER, f"an artifact of another kind: {header!r}"
    reader.read_bytes()  # torch's digest of its sources
    key, content = reader.read_str(), reader.read_bytes()
    assert reader.is_finished(), "an artifact with more to it than its header says"
    with torch.no_grad():
        assert torch.compiler.load_cache_artifacts(content) is not None, "an artifact that torch finds nothing in"
        return artifacts._load_impl(contextlib.nullcontext(), key)


_LOAD_LIBRARY = "load_pybinding_async"


@contextlib.contextmanager
def cpp_libraries(known: Mapping[str, Path]) -> Iterator[dict[str, Path]]:
    """Inside this block a C++ kernel is loaded from `known`, where its `library_digest` is there; what Inductor builds
    instead is added to the mapping yielded. Inside `inductor_cache_dir`, whose lock keeps other threads out."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    built: dict[str, Path] = {}
    original = CppPythonBindingsCodeCache.__dict__[_LOAD_LIBRARY]

    def load(cls: Any, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        digest = library_digest(cls.__name__, args, kwargs)
        if digest in known:
            library = cls._load_library(str(known[digest]), f"piecegraph_{digest}")
            return lambda: getattr(library, cls.entry_function)
        future = original.__get__(None, cls)(*args, **kwargs)

        def built_one() -> Any:
            kernel = future()
            file = getattr(sys.modules.get(getattr(kernel, "__module__", "") or ""), "__file__", None)
            file = file or getattr(getattr(kernel, "__self__", None), "__file__", None)
            if file is not None:
                built[digest] = Path(file)
            return kernel

        return built_one

    setattr(CppPythonBindingsCodeCache, _LOAD_LIBRARY, classmethod(load))
    try:
        yield built
    finally:
        setattr(CppPythonBindingsCodeCache, _LOAD_LIBRARY, original)


def library_digest(kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """sha256 of all that a C++ kernel is asked for by, hex: source, argument types, device and flags."""
    named = sorted((name, repr(value)) for name, value in kwargs.items() if not callable(value))
    return hashlib.sha256(repr((kind, [repr(arg) for arg in args], named)).encode()).hexdigest()


def generated_kernels() -> int:
    """Kernels Inductor generated in this process so far (cache hits count as well)."""
    from torch._inductor import metrics

    return int(metrics.generated_kernel_count)


def process_settings() -> dict[str, Any]:
    """Process-wide torch settings that change generated code, as plain values."""
    return {
        "num_threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


_SETTINGS_THAT_DECIDE_NOTHING = frozenset({"base_dir", "debug_dir_root"})  # paths of one machine


def tracing_settings() -> dict[str, Any]:
    """Process-wide torch settings that change what a trace is, as plain values."""
    devices = ("cpu", "cuda")
    return {
        "autocast": {
            device: str(torch.get_autocast_dtype(device)) for device in devices if torch.is_autocast_enabled(device)
        },
        "default_device": str(torch.get_default_device()),
        "inference_mode": torch.is_inference_mode_enabled(),
    }


def inductor_settings_digest() -> str:
    """sha256 of how this process has Dynamo and Inductor set, hex: they may be set behind our back."""
    from torch._inductor import config as inductor_config

    found = {}
    for name, config in (("dynamo", torch._dynamo.config), ("inductor", inductor_config)):
        values = config.save_config_portable()
        found[name] = {
            key: sorted(map(repr, value)) if isinstance(value, set | frozenset) else repr(value)
            for key, value in values.items()
            if key not in _SETTINGS_THAT_DECIDE_NOTHING
        }
    return hashlib.sha256(repr([sorted(values.items()) for values in found.values()]).encode()).hexdigest()


def cpu_capability() -> str:
    """The instruction set torch's own kernels use."""
    return str(torch.backends.cpu.get_cpu_capability())


def apply_process_settings(settings: Mapping[str, Any]) -> None:
    """Make this process's settings those of the one that called `process_settings`."""
    torch.set_num_threads(settings["num_threads"])
    torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    torch.use_deterministic_algorithms(settings["deterministic"])
    torch.set_float32_matmul_precision(settings["float32_matmul_precision"])


# -- CUDA graphs --------------------------------------------------------------------------------


def alias_without_ownership(tensor: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor over the same memory that does not keep it: a graph pool may hand it out again."""
    address = tensor.untyped_storage().data_ptr()
    nbytes = tensor.untyped_storage().nbytes()
    storage = torch._C._construct_storage_from_data_pointer(address, tensor.device, nbytes)
    metadata = {
        "size": tensor.shape,
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "storage_offset": tensor.storage_offset(),
    }
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)


def pool_bytes(pool: Any) -> int:
    """Bytes of device memory a CUDA graph pool holds."""
    segments = torch.cuda.memory.memory_snapshot(pool, include_traces=False)
    return sum(int(segment["total_size"]) for segment in segments)


def forget_cublas_workspaces() -> None:
    """Let go of the scratch memory cuBLAS keeps per stream: what a graph captured with stays in its pool."""
    torch._C._cuda_clearCublasWorkspaces()


def graph_exec_of(graph: torch.cuda.CUDAGraph) -> int:
    """The handle of an instantiated graph (torch 2.11 has the method, its stubs do not)."""
    handle: int = graph.raw_cuda_graph_exec()  # type: ignore[attr-defined,unused-ignore]
    return handle


def abandon_capture(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture that went wrong, whatever state it is in, and free what it took."""
    try:
        graph.capture_end()
    except RuntimeError:  # it was invalid: torch does not tell its generators that it is over
        with contextlib.suppress(RuntimeError):
            _capture_next_to_nothing()
    with contextlib.suppress(RuntimeError):
        graph.reset()


def _capture_next_to_nothing() -> None:
    """On the current stream. The end of a good capture takes torch's random generators out of any: else
    `torch.rand` fails in the whole process ("Offset increment outside graph capture"), until the next one."""
    flag = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        flag.zero_()
    finally:
        graph.capture_end()
        graph.reset()


# -- logs ---------------------------------------------------------------------------------------


def emit_artifact(name: str, text: Callable[[], str]) -> None:
    """`text()` appears under `name` in torch's structured trace (tlparse), where one is being written."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)
