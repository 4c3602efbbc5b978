"""Kernels of ops that Python code registered: they run while a model is traced and compiled, so that what they read is
part of what was made.

Torch keeps the functions that `Library.impl` was given where Python cannot find them. What can be found is the file of
the library, by which it is known which module registered the kernels: its source, and the globals that its functions
name, stand for them. A kernel whose module does not name the op, or that is made inside another function, could be
anything; no key can be made of it.

The same holds for functions that a graph calls as they are (`torch._dynamo.allow_in_graph`): no trace enters them.
"""

from __future__ import annotations

import hashlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from piecegraph.compiler.tracing.code_reads import codes_within, function_with_globals, global_chains
from piecegraph.compiler.tracing.read_facts import NotComparable, class_name, is_library_module, value_fact
from piecegraph.passes.ops.op_types import HigherOrderOperator, OpOverload, OpOverloadPacket

_REGISTRARS = frozenset({"impl", "register_fake", "impl_abstract", "register_kernel", "custom_op", "py_impl"})


def called_ops(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """Return the names (`namespace::name`) of the ops that `graph_module` and the graphs inside it call, sorted."""
    found = set()
    for each in graph_module.modules():
        for node in each.graph.nodes if isinstance(each, fx.GraphModule) else ():
            if isinstance(node.target, OpOverload):
                found.add(str(node.target._schema.name))
            elif isinstance(node.target, OpOverloadPacket):
                found.add(str(node.target._qualified_op_name))
    return tuple(sorted(found))


def own_functions(graph_module: fx.GraphModule) -> tuple[Any, ...]:
    """Return what `graph_module` and the graphs inside it call that is neither an op nor a function of a library."""
    found: dict[int, Any] = {}
    for each in graph_module.modules():
        for node in each.graph.nodes if isinstance(each, fx.GraphModule) else ():
            if node.op == "call_function" and is_own_function(node.target):
                found[id(node.target)] = node.target
    return tuple(found.values())


def is_own_function(target: Any) -> bool:
    """Return whether `target`, which a graph calls, is neither an op nor a function of a library.

    Two of one name may compute different things, such as two functions that one function returned.
    """
    if isinstance(target, OpOverload | OpOverloadPacket | HigherOrderOperator | types.BuiltinFunctionType):
        return False
    if isinstance(target, types.FunctionType | type):
        return not is_library_module(target.__module__ or "")
    is_of_dynamo = type(target).__module__.startswith("torch._dynamo.")  # its stand-ins for functions of numpy
    return not is_of_dynamo and type(target) not in _DESCRIPTORS


_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)


def own_function_fact(value: Any, detail: Any = None) -> str:
    """Describe a function that a graph calls, with all that it reads by name.

    Raises `NotComparable` for anything but a function, and for one that reads what cannot be described.
    """
    if not isinstance(value, types.FunctionType):
        raise NotComparable(f"{class_name(type(value))} that the graph calls")
    return hashlib.sha256(repr(function_with_globals(value)).encode()).hexdigest()[:16]


def has_python_kernels(name: str) -> bool:
    """Return whether code outside libraries registered kernels of the op `name` (`namespace::name`) from Python."""
    return bool(_functions(name)) or bool(_files(name))


def python_kernels_fact(value: Any, detail: Any = None) -> str:
    """Describe the kernels of the op of the name `value` that code outside libraries registered from Python.

    Raises `NotComparable` for kernels that cannot be described.
    """
    functions = [function_with_globals(each) for each in _functions(value)]
    modules = [_module_facts(file, value.rpartition("::")[2]) for file in _files(value)]
    return hashlib.sha256(repr([functions, modules]).encode()).hexdigest()[:16]


def _functions(name: str) -> list[types.FunctionType]:
    """Return the kernels of an op that torch keeps where they can be found, those of libraries left out."""
    entry = torch._library.simple_registry.singleton.find(name)
    definition = torch._library.custom_ops.OPDEFS.get(name)
    found = [getattr(entry.fake_impl.kernel, "func", None)]
    if definition is not None:
        found += [definition._init_fn, definition._abstract_fn]
    packet = _packet(name)
    for overload in packet.overloads() if packet is not None else ():
        found += getattr(packet, overload).py_kernels.values()
    return [
        each for each in found if isinstance(each, types.FunctionType) and not is_library_module(each.__module__ or "")
    ]


def _packet(name: str) -> Any:
    namespace, _, short = name.partition("::")
    return getattr(getattr(torch.ops, namespace), short, None)


def _files(name: str) -> list[str]:
    """Return the Python files, those of libraries left out, whose `Library` registered kernels of an op."""
    packet = _packet(name)
    found: dict[str, None] = {}
    for overload in packet.overloads() if packet is not None else ():
        full = name if overload == "default" else f"{name}.{overload}"
        for file in re.findall(r": registered at (.+):\d+ ::", torch._C._dispatch_dump(full)):
            if file.endswith((".py", ">")) and not _is_of_a_library(file):  # `<string>`, `<stdin>`
                found[file] = None
    return sorted(found)


def _is_of_a_library(file: str) -> bool:
    module = _module_of(file)
    return module is not None and is_library_module(module.__name__)


def _module_of(file: str) -> types.ModuleType | None:
    found = [each for each in list(sys.modules.values()) if getattr(each, "__file__", None) == file]
    return min(found, key=lambda each: each.__name__, default=None)


def _module_facts(file: str, name: str) -> Any:
    """Describe the module of `file`, which registered kernels of the op `name`."""
    module = _module_of(file)
    try:
        source = Path(file).read_bytes()
        code = compile(source, file, "exec")
    except (OSError, SyntaxError, ValueError):
        module = None
    if module is None:
        raise NotComparable(f"kernel registered in {file}, which is not a source file of an imported module")
    codes = list(codes_within(code))
    _refuse_unknown_kernels(codes, file, name)
    home, read = vars(module), {}
    for each in codes[1:]:
        for first, *_ in global_chains(each):
            if first in home:
                read[first] = _told(home[first])
    return [module.__name__, hashlib.sha256(source).hexdigest(), sorted(read.items())]


def _refuse_unknown_kernels(codes: list[types.CodeType], file: str, name: str) -> None:
    texts = [text for each in codes for text in _texts(each)]
    if not any(re.search(rf"(?:^|::|\s){re.escape(name)}\b", text) for text in texts):
        raise NotComparable(f"kernel registered through {file}, which does not name it")
    for each in codes[1:]:
        if _REGISTRARS & set(each.co_names) and any(inner.co_freevars for inner in list(codes_within(each))[1:]):
            raise NotComparable(f"kernel that {each.co_qualname} in {file} may have made of what it was given")


def _texts(code: types.CodeType) -> Iterator[str]:
    yield from (each for each in code.co_consts if isinstance(each, str))
    yield from code.co_names  # a function under a decorator that names the op after it
    yield code.co_name


def _told(value: Any) -> str:
    try:
        return value_fact(value)
    except (NotComparable, RecursionError):
        return class_name(type(value))
