"""Facts about values that a trace read, by the kind of guard that Dynamo put on each.

A fact is text that is equal in another process exactly where the guard would hold there.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from piecegraph.compiler.torch_compat.fake_tensors import FakeTensor
from piecegraph.passes.ops.op_types import HigherOrderOperator, OpOverload, OpOverloadPacket

LIBRARIES = frozenset({"torch", "transformers", "piecegraph", *sys.stdlib_module_names})
"""Packages whose source is known to the key by a version or a digest, so that only what was changed in them counts."""


def is_library_module(module: str) -> bool:
    """Return whether the module of that name belongs to one of `LIBRARIES`."""
    return module.partition(".")[0] in LIBRARIES


class NotComparable(Exception):
    """An error for a value about which another process could compare nothing. The message is the value's type."""


def type_fact(value: Any, detail: Any = None) -> str:
    """Return the class of `value`."""
    return class_name(type(value))


def class_name(kind: type) -> str:
    """Return the module and qualified name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def length_fact(value: Any, detail: Any = None) -> str:
    """Return the class and length of `value`."""
    return f"{type_fact(value)} of {len(value)}"


def keys_fact(value: Any, detail: Any = None) -> str:
    """Return the class and keys of a mapping, in order."""
    return f"{type_fact(value)} {[value_fact(key) for key in value]}"


def names_fact(value: Any, detail: Any = None) -> str:
    """Return a digest of the keys of a mapping, whatever their order."""
    return hashlib.sha256(repr(sorted(value)).encode()).hexdigest()[:16]


def member_fact(value: Any, detail: Any) -> str:
    """Return whether the key `detail` is in `value`."""
    return str(detail in value)


def attribute_fact(value: Any, detail: str) -> str:
    """Return whether `value` has the attribute `detail`."""
    return str(hasattr(value, detail))


def own_attribute_fact(value: Any, detail: str) -> str:
    """Return whether the instance dictionary of `value` has the attribute `detail`."""
    return str(detail in getattr(value, "__dict__", ()))


def own_names_fact(value: Any, detail: Any = None) -> str:
    """Return the names of the attributes in the instance dictionary of `value`."""
    return repr(sorted(map(str, getattr(value, "__dict__", ()))))


def empty_fact(value: Any, detail: Any = None) -> str:
    """Return whether `value` is empty."""
    return str(len(value) == 0)


def tensor_fact(value: Any, detail: Any = None) -> str:
    """Describe a tensor without its values. Raises `NotComparable` for anything but a strided tensor."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise NotComparable(type_fact(value))
    kind = "" if isinstance(value, FakeTensor | torch.nn.Parameter) or type(value) is torch.Tensor else type_fact(value)
    return f"{kind} {value.dtype} {value.device} {tuple(value.shape)} {tuple(value.stride())} {value.requires_grad}"


def contents_fact(value: Any, detail: Any = None) -> str:
    """Describe a tensor with a digest of its values. Raises `NotComparable` for a tensor without values."""
    text = tensor_fact(value)
    if isinstance(value, FakeTensor) or value.device.type == "meta":
        raise NotComparable("tensor without values")
    flat = value.detach().cpu().contiguous().flatten()
    return f"{text} {hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()}"


def dispatch_fact(value: Any, detail: Any = None) -> str:
    """Return the dispatch keys of a tensor."""
    return str(torch._C._dispatch_keys(value).raw_repr())


def value_fact(value: Any, detail: Any = None) -> str:
    """Describe `value` completely. Raises `NotComparable` for a value that has no complete description."""
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if type(value) is float:
        return value.hex()
    if type(value) is complex:
        return f"complex {value.real.hex()} {value.imag.hex()}"
    if type(value) in (list, tuple, torch.Size):
        return f"{type(value).__name__} {[value_fact(item) for item in value]}"
    if type(value) in (set, frozenset):
        return f"{type(value).__name__} {sorted(map(value_fact, value))}"
    if type(value) is dict:
        return f"dict {[(value_fact(key), value_fact(item)) for key, item in value.items()]}"
    if isinstance(value, enum.Enum):
        return f"{class_name(type(value))}.{value.name} {_of_member(value)}"
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value)
    if type(value) in (range, slice) or isinstance(value, torch.finfo | torch.iinfo):
        return repr(value)
    if isinstance(value, re.Pattern):
        return f"pattern {value.pattern!r} {value.flags}"
    if type(value) is object:
        return "object"  # a sentinel: it has no properties but its place
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:  # a number, not an array
        return f"{type_fact(value)} {value.tobytes().hex()}"
    if type(value).__module__.startswith("numpy.dtypes") or type_fact(value) == "numpy.dtype":
        return f"dtype {value!s}"
    if isinstance(value, int | str | float) and type(value).__repr__ in (int.__repr__, str.__repr__, float.__repr__):
        return f"{type_fact(value)} {value!r}"
    return identity_fact(value)


def order_fact(value: Any, detail: Any = None) -> str:
    """Describe the items of a set in its order, which for strings depends on the process (`PYTHONHASHSEED`)."""
    return f"{type_fact(value)} in order {[value_fact(item) for item in value]}"


def _of_member(member: enum.Enum) -> str:
    try:
        return value_fact(member.value)
    except (NotComparable, RecursionError):
        return ""


def identity_fact(value: Any, detail: Any = None) -> str:
    """Identify an object of the program by its name and its code. Raises `NotComparable` where these do not suffice."""
    if isinstance(value, types.FunctionType):
        return _function_fact(value)
    if isinstance(value, types.CodeType):
        return f"code {value.co_qualname} {code_digest(value)}"
    if isinstance(value, type):
        return class_name(value)
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        is_free = owner is None or isinstance(owner, types.ModuleType | type)
        if not is_free and not type(owner).__module__.startswith("pybind11_builtins"):
            return f"{type_fact(owner)}.{value.__name__} of {value_fact(owner)}"
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, types.MethodType):
        return f"method of {identity_fact(value.__self__)}: {identity_fact(value.__func__)}"
    if isinstance(value, _DESCRIPTORS):
        return f"{class_name(value.__objclass__)}.{value.__name__}"
    if isinstance(value, staticmethod | classmethod):
        return f"{type_fact(value)} {identity_fact(value.__func__)}"
    if type(value) is property:
        return f"property {[None if each is None else identity_fact(each) for each in (value.fget, value.fset)]}"
    if isinstance(value, functools._lru_cache_wrapper):
        return f"cache of {identity_fact(value.__wrapped__)}"
    if isinstance(value, OpOverload | OpOverloadPacket | HigherOrderOperator):
        return f"op {value}"
    if type_fact(value) == "numpy.ufunc":
        return f"ufunc {value.__name__}"
    if type(value).__module__ == "typing" or isinstance(value, types.GenericAlias | types.UnionType):
        return repr(value)
    if value is None or type(value) in _PLAIN or isinstance(value, enum.Enum | torch.dtype | re.Pattern):
        return value_fact(value)
    raise NotComparable(type_fact(value))


_PLAIN = frozenset({bool, int, float, complex, str, bytes, object})
_DESCRIPTORS = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)


def _function_fact(function: types.FunctionType) -> str:
    if getattr(function, "_dynamo_marked_constant", False) and not is_library_module(function.__module__ or ""):
        raise NotComparable("function under torch._dynamo.assume_constant_result, which no trace enters")
    name = f"{function.__module__}.{function.__qualname__}"
    notes = "" if is_library_module(function.__module__ or "") else f" {_annotations(function)}"
    return f"{name} {code_digest(function.__code__)}{notes}".rstrip()


def _annotations(function: types.FunctionType) -> str:
    """Describe a function's annotations as far as possible: Dynamo puts no guard on code that reads them."""
    found = []
    for name, value in sorted(getattr(function, "__annotations__", {}).items()):
        try:
            found.append((name, value_fact(value)))
        except (NotComparable, RecursionError):
            found.append((name, type_fact(value)))
    return str(found) if found else ""


def code_digest(code: types.CodeType) -> str:
    """Return a digest of what a code object does, without its lines and files."""
    text = hashlib.sha256(code.co_code)
    for constant in code.co_consts:
        text.update((code_digest(constant) if isinstance(constant, types.CodeType) else _constant(constant)).encode())
    text.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    return text.hexdigest()[:16]


def _constant(value: Any) -> str:
    """Return a constant as text; the items of a set are sorted, since their order differs between processes."""
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


FACTS: Mapping[str, Callable[[Any, Any], str]] = {
    "type": type_fact,
    "length": length_fact,
    "keys": keys_fact,
    "member": member_fact,
    "attribute": attribute_fact,
    "names": names_fact,
    "own names": own_names_fact,
    "own attribute": own_attribute_fact,
    "order": order_fact,
    "empty": empty_fact,
    "tensor": tensor_fact,
    "contents": contents_fact,
    "dispatch": dispatch_fact,
    "value": value_fact,
    "identity": identity_fact,
}

KIND_OF_GUARD: Mapping[str, str] = {
    "BOOL_MATCH": "value",
    "BUILTIN_MATCH": "identity",
    "CLASS_MATCH": "identity",
    "CLOSURE_MATCH": "identity",
    "CONSTANT_MATCH": "value",
    "CONSTANT_SUBCLASS_MATCH": "value",
    "DICT_CONTAINS": "member",
    "DICT_KEYS_MATCH": "keys",
    "DICT_NOT_CONTAINS": "member",
    "DICT_VERSION": "value",
    "DISPATCH_KEY_SET_MATCH": "dispatch",
    "EMPTY_NN_MODULE_HOOKS_DICT": "empty",
    "EQUALS_MATCH": "value",
    "FUNCTION_MATCH": "identity",
    "HASATTR": "attribute",
    "ID_MATCH": "identity",
    "MAPPING_KEYS_CHECK": "keys",
    "MODULE_MATCH": "identity",
    "NN_MODULE": "type",
    "NONE_MATCH": "value",
    "NOT_NONE_MATCH": "type",
    "NOT_PRESENT_IN_GENERIC_DICT": "own attribute",
    "SEQUENCE_LENGTH": "length",
    "SET_CONTAINS": "member",
    "SET_NOT_CONTAINS": "member",
    "TENSOR_MATCH": "tensor",
    "TYPE_MATCH": "type",
}
"""The kind of fact for each of Dynamo's kinds of guard. A guard of any other kind on a value that is not an argument
cannot be compared."""
