"""Find what the bytecode of traced functions reads by name and Dynamo puts no guard on.

Such reads failed, or found something that nobody is supposed to change.
"""

from __future__ import annotations

import abc
import builtins
import dis
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from piecegraph.compiler.tracing.read_facts import (
    NotComparable,
    class_name,
    code_digest,
    is_library_module,
    value_fact,
)

_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_NO_CODE = frozenset({"EXTENDED_ARG", "CACHE"})

FUNCTIONS_OF_STATE = (
    "sys.getrecursionlimit",
    "sys.get_int_max_str_digits",
    "torch.__future__.get_overwrite_module_params_on_conversion",
    "torch._C._functorch.get_dynamic_layer_stack_depth",
    "torch._C._get_cublas_allow_tf32",
    "torch._C._get_privateuse1_backend_name",
    "torch._C._is_any_autocast_enabled",
    "torch.accelerator.current_accelerator",
    "torch.accelerator.current_device_index",
    "torch.accelerator.is_available",
    "torch.autograd._is_checkpoint_valid",
    "torch.cuda.current_device",
    "torch.cuda.is_available",
    "torch.cuda.is_initialized",
    "torch.distributed.get_rank",
    "torch.distributed.get_world_size",
    "torch.distributed.is_available",
    "torch.distributed.is_initialized",
    "torch.get_autocast_gpu_dtype",
    "torch.get_default_dtype",
    "torch.is_autocast_cache_enabled",
    "torch.is_autocast_cpu_enabled",
    "torch.is_autocast_enabled",
    "torch.xpu.current_device",
    "torch.backends.mps.is_available",
    "torch.backends.mps.is_built",
    "torch.mps.is_available",
    "torch.mtia.is_available",
    "torch.xpu.is_available",
    "torch.xpu.is_initialized",
)
"""Functions that take no argument and tell a state of the process. Dynamo replaces their calls by the result, and puts
a guard on few of the results."""

_CREATE_SET = frozenset({"BUILD_SET", "SET_ADD", "SET_UPDATE"})
_WITHOUT_ORDER = frozenset({"len", "sorted", "any", "all", "bool"})
"""Functions of one argument whose results do not depend on the order of a set's items."""

_SHORT_NAMES = frozenset(name.rpartition(".")[2] for name in FUNCTIONS_OF_STATE)


def global_chains(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the globals that `code` reads, each with the attributes that are read right after it: `a.b.c` is
    ("a", "b", "c")."""
    found: dict[tuple[str, ...], None] = {}
    chain: list[str] = []
    for each in dis.get_instructions(code):
        if each.opname in _NO_CODE:
            continue
        if each.opname in _ATTRIBUTE and chain:
            chain.append(each.argval)
            continue
        if chain:
            found[tuple(chain)] = None
        chain = [each.argval] if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
    return tuple(found)


def creates_unordered(code: types.CodeType) -> bool:
    """Return whether `code` may create a set whose order depends on the process: of anything but numbers, and not only
    to look an item up in it, to count its items or to sort them."""
    instructions = _instructions(code)
    for at, each in enumerate(instructions):
        if _is_looked_up(instructions, at):
            continue
        if each.opname in _CREATE_SET:
            count = each.arg if each.opname == "BUILD_SET" and each.arg is not None else 1
            items = instructions[max(at - count, 0) : at]
            if count and not all(one.opname.startswith("LOAD_") and _has_fixed_order(one.argval) for one in items):
                return True
        elif isinstance(each.argval, frozenset) and not _has_fixed_order(each.argval):
            return True
        elif each.opname == "LOAD_GLOBAL" and each.argval in ("set", "frozenset") and "NULL" in each.argrepr:
            before = instructions[at - 1] if at else None
            if before is None or before.opname != "LOAD_GLOBAL" or before.argval not in _WITHOUT_ORDER:
                return True
    return False


def reads_order_of(code: types.CodeType, name: str) -> bool | None:
    """Return whether `code` may read the order of the set that it calls `name`; None where it does not name one."""
    if name in code.co_consts and "getattr" in code.co_names:
        return True
    if not any(name in names for names in (code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars)):
        return None  # as almost all code, which need not be disassembled
    instructions = _instructions(code)
    loads = [at for at, each in enumerate(instructions) if each.opname.startswith("LOAD_")]
    places = [at for at in loads if instructions[at].opname != "LOAD_CONST" and instructions[at].argval == name]
    return any(not _is_looked_up(instructions, at) for at in places) if places else None


def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    return [each for each in dis.get_instructions(code) if each.opname not in _NO_CODE | {"PRECALL", "PUSH_NULL"}]


def _is_looked_up(instructions: Sequence[dis.Instruction], at: int) -> bool:
    """Return whether the set that instruction `at` loads is only searched, or given to a function without order."""
    after = instructions[at + 1] if at + 1 < len(instructions) else None
    if after is None or after.opname == "CONTAINS_OP":
        return after is not None
    first = at
    while first and instructions[first].opname in _ATTRIBUTE:
        first -= 1
    before = instructions[first - 1] if first else None
    is_only_argument = after.opname == "CALL" and after.arg == 1
    return is_only_argument and before is not None and before.argval in _WITHOUT_ORDER


def _has_fixed_order(value: Any) -> bool:
    """Return whether a set of `value`, or `value` itself where it is a set, has the same order in every process."""
    items = value if isinstance(value, frozenset) else [value]
    return all(isinstance(item, bool | int | float | complex) for item in items)


def imported_modules(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of the modules that `code` imports by absolute names."""
    names = [each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"]
    return tuple(dict.fromkeys(name for name in names if name))


def first_absent(home: Mapping[str, Any], chain: tuple[str, ...]) -> int | None:
    """Return the index of the first name of `chain` that nothing has, `home` being the globals; None where all are
    there, or where finding out would run code of the objects."""
    if chain[0] not in home:
        return 0
    value = home[chain[0]]
    for index, name in enumerate(chain[1:], 1):
        own = _own_attributes(value)
        if name in own:
            value = own[name]
            continue
        if any(name in vars(each) for each in _classes(value)):
            return None
        lookup = type(value).__getattribute__
        is_plain = not isinstance(lookup, types.FunctionType) and not hasattr(type(value), "__getattr__")
        if isinstance(value, types.ModuleType) and "__getattr__" in own:
            is_plain = False
        return index if is_plain else None
    return None


def values_along(home: Mapping[str, Any], chain: tuple[str, ...]) -> Iterator[Any]:
    """Yield the value that each name of `chain` stands for, as far as the objects themselves hold it."""
    value: Any = types.SimpleNamespace(**{chain[0]: home[chain[0]]}) if chain[0] in home else None
    for name in chain:
        own = _own_attributes(value)
        if name not in own:
            return
        value = own[name]
        yield value


def is_function_of_state(value: Any) -> bool:
    """Return whether `value` is one of `FUNCTIONS_OF_STATE`, or what one of them caches."""
    if getattr(value, "__name__", None) not in _SHORT_NAMES or isinstance(value, type | types.ModuleType):
        return False
    known = [_named(name) for name in FUNCTIONS_OF_STATE]
    return any(value is each or value is getattr(each, "__wrapped__", each) for each in known)


def _named(name: str) -> Any:
    top, *names = name.split(".")
    value: Any = sys.modules.get(top)
    for each in names:
        value = getattr(value, each, None)
    return value


def result_fact(value: Any, detail: Any = None) -> str:
    """Describe what the function `value` returns now, or the kind of exception that it raises."""
    try:
        return value_fact(value())
    except NotComparable:
        raise
    except Exception as error:  # of a rank where there are none, of a device where there is none
        return type(error).__name__


def registered_fact(value: Any, detail: Any = None) -> str:
    """Return the names of the classes outside libraries that are registered as subclasses of the class `value`.

    Classes of libraries are registered while they are imported, and count by the library's version.
    """
    return repr([name for name in registered_classes(value) if not is_library_module(name)])


def registered_classes(kind: type) -> list[str]:
    """Return the names of the classes that were registered as subclasses of `kind`, or of a subclass of it."""
    found: set[str] = set()
    todo: list[type] = [kind]
    while todo:
        each = todo.pop()
        if isinstance(each, abc.ABCMeta):
            registered = [one for reference in abc._get_dump(each)[0] if (one := reference()) is not None]  # type: ignore[attr-defined]
            found |= {class_name(one) for one in registered}
            todo += type.__subclasses__(cast("type[Any]", each))
    return sorted(found)


def _own_attributes(value: Any) -> Mapping[str, Any]:
    try:
        own: Mapping[str, Any] = vars(value)
    except TypeError:  # it has none
        return {}
    return own


def _classes(value: Any) -> tuple[type, ...]:
    return (*(value.__mro__ if isinstance(value, type) else ()), *type(value).__mro__)


def has_own_instance_check(kind: type) -> bool:
    """Return whether code outside libraries decides what is an instance or a subclass of `kind`."""
    return bool(_instance_checks(kind))


def instance_checks_fact(value: Any, detail: Any = None) -> str:
    """Describe the functions that decide what is an instance of the class `value`, and what they read by name.

    Raises `NotComparable` where that cannot be written down.
    """
    return repr([function_with_globals(each) for each in _instance_checks(value)])


def _instance_checks(kind: type) -> list[types.FunctionType]:
    metaclasses = type.mro(type(kind))
    places: list[tuple[Sequence[type], str]] = [
        (metaclasses, "__instancecheck__"),
        (metaclasses, "__subclasscheck__"),
        (kind.__mro__, "__subclasshook__"),
    ]
    found = []
    for classes, name in places:
        for each in classes:
            function = vars(each).get(name)
            function = getattr(function, "__func__", function)
            if isinstance(function, types.FunctionType) and not is_library_module(function.__module__ or ""):
                found.append(function)
    return found


def function_with_globals(function: types.FunctionType, inside: tuple[types.FunctionType, ...] = ()) -> list[Any]:
    """Describe a function by its code, its closure, its defaults and the globals that it names, with the functions
    among them described alike. Raises `NotComparable` for a value that cannot be written down."""
    if function in inside:
        return ["function around this", inside.index(function)]
    around = (*inside, function)
    read: dict[str, Any] = {}
    for code in codes_within(function.__code__):
        for chain in global_chains(code):
            read[".".join(chain)] = _global(function.__globals__, chain, around)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    held = [_described(each, around) for each in (*cells, function.__defaults__, function.__kwdefaults__)]
    return [
        f"{function.__module__}.{function.__qualname__}",
        code_digest(function.__code__),
        held,
        sorted(read.items()),
    ]


def codes_within(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield `code` and the code of every function and class that is written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_within(constant)


def _global(home: Mapping[str, Any], chain: tuple[str, ...], inside: tuple[types.FunctionType, ...]) -> Any:
    if chain[0] not in home:
        return ["builtin", _described(getattr(builtins, chain[0], "absent"), inside)]
    value = home[chain[0]]
    for name in chain[1:]:  # of a module outside libraries what is read is what counts
        if not isinstance(value, types.ModuleType) or is_library_module(value.__name__):
            break
        value = vars(value).get(name, "absent")
    return _described(value, inside)


def _described(value: Any, inside: tuple[types.FunctionType, ...]) -> Any:
    if isinstance(value, types.FunctionType) and not is_library_module(value.__module__ or ""):
        return function_with_globals(value, inside)
    if isinstance(value, type):
        return class_name(value)
    return value_fact(value)
