"""The part of a module that a trace may read, as factors of a key: every plain attribute of every submodule.

Submodules at paths that differ in numbers alone share a row, in which equal values are written once: the layers of a
decoder differ little, and people read entries.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import itertools
import logging
import re
import struct
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from piecegraph.cache.store.keys import plain
from piecegraph.compiler.rewriting.pass_contexts import owns_its_storage
from piecegraph.compiler.torch_compat.fake_tensors import FakeTensor
from piecegraph.compiler.tracing.class_factors import class_facts
from piecegraph.compiler.tracing.read_facts import code_digest
from piecegraph.errors import KeyFactorError
from piecegraph.passes.ops.op_types import OpOverload, OpOverloadPacket

EXCLUDED: Mapping[str, str] = {
    "_commit_hash": "the download a model came from; its contents are in the key",
    "_name_or_path": "where a model was read from; a path of one machine",
    "generation_config": "the use of logits; no forward reads it",
    "name_or_path": "where a model was read from; a path of one machine",
    "transformers_version": "the version that wrote the config; the version that runs is in the key",
}
"""The attributes of transformers' modules and configs that no key holds, with the reasons."""

LOADING_ATTRIBUTES: Mapping[str, str] = {
    "_is_hf_initialized": "how weights got their values",
    "_weight_conversions": "how a checkpoint's tensors became the model's",
}
"""The attributes that transformers sets on modules of any class and that no key holds, with the reasons."""

MAX_TENSOR_BYTES = 1 << 20
"""The largest tensor attribute (neither parameter nor buffer) whose values go into the key."""

_POINTER_BYTES = struct.calcsize("P")
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


def model_factors(module: nn.Module) -> dict[str, Any]:
    """Return the factors of `module` and all its submodules; no weights are read.

    Raises `KeyFactorError`, naming the attribute, for an attribute of a type no key can be made of.
    """
    try:
        return _model_factors(module)
    except RecursionError:
        raise KeyFactorError(f"an attribute of {_class_name(type(module))} or below it contains itself.") from None


def _model_factors(module: nn.Module) -> dict[str, Any]:
    described = _Describer(module)
    rows: dict[str, dict[str, dict[str, Any]]] = {}  # by pattern of the path and by the numbers in it
    for path, each in module.named_modules():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        numbers = ".".join(re.findall(r"(?<![^.])\d+(?![^.])", path))
        rows.setdefault(pattern, {})[numbers] = described.module(path, each)
    return {
        "class": _class_name(type(module)),
        "modules": {pattern: _folded(found) for pattern, found in rows.items()},
        "classes": described.classes,
        "objects": described.objects,
        "weights": _folded_weights(_weights(module)),
        "attention": _registered(module, described),
    }


def _folded(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return facts of modules by number as what all have in common and the rest in the order of the numbers."""
    if len(found) == 1 and "" in found:
        return found[""]
    every = list(found.values())
    names = dict.fromkeys(name for facts in every for name in facts)
    texts = [{name: repr(value) for name, value in facts.items()} for facts in every]  # 1, 1.0 and True differ
    same = {name: every[0][name] for name in names if len({text.get(name) for text in texts}) == 1}
    rest = {
        name: {number: facts[name] for number, facts in found.items() if name in facts}
        for name in names
        if name not in same
    }
    return {"at": " ".join(found), "all": same, "each": rest}


def _weights(module: nn.Module) -> dict[str, Any]:
    """Describe parameters and buffers by path, and which are one tensor or share memory. Raises `KeyFactorError`."""
    first: dict[int, str] = {}
    storages: dict[int, str] = {}
    found = {}
    named = [
        *(("parameter", name, tensor) for name, tensor in module.named_parameters(remove_duplicate=False)),
        *(("buffer", name, tensor) for name, tensor in module.named_buffers(remove_duplicate=False)),
    ]
    for kind, name, tensor in named:
        _refuse_without_strides(tensor, f"{kind} {name}")
        same = first.setdefault(id(tensor), name)
        if same != name:
            found[name] = f"{kind}, the same as {same}"
            continue
        text = f"{kind} {_tensor_text(tensor)}"
        if not owns_its_storage(tensor) and tensor.device.type != "meta":
            shared = storages.setdefault(tensor.untyped_storage()._cdata, name)
            text += f" at {tensor.storage_offset()} of memory of its own" if shared == name else f" in that of {shared}"
        found[name] = text
    return found


def _refuse_without_strides(tensor: torch.Tensor, where: str) -> None:
    """Raise `KeyFactorError` for a sparse or nested tensor, whose memory is not described by sizes and strides."""
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout)
        raise KeyFactorError(f"{where} is a tensor of layout {layout}, of which no key can be made.")


def _tensor_text(tensor: torch.Tensor) -> str:
    kind = type(tensor)
    is_plain = kind in (torch.Tensor, nn.Parameter, FakeTensor)  # a fake one stands for one of the others
    subclass = "" if is_plain else f" {_class_name(kind)}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    gradient = " requires_grad" if tensor.requires_grad else ""
    return f"{dtype} {tensor.device} {tuple(tensor.shape)} {tuple(tensor.stride())}{gradient}{subclass}"


def _folded_weights(found: dict[str, str]) -> dict[str, Any]:
    """Return, for each pattern of paths, the texts of its weights and the numbers at which each occurs."""
    by_pattern: dict[str, dict[str, list[str]]] = {}
    for path, text in found.items():
        numbers = re.findall(r"(?<![^.])\d+(?![^.])", path)
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
        general = text
        for number in numbers:  # "the same as layers.3.weight" in layer 3
            general = re.sub(rf"(?<=\.){number}(?=\.)", "*", general)
        by_pattern.setdefault(pattern, {}).setdefault(general, []).append(".".join(numbers))
    return {
        pattern: {text: " ".join(numbers) for text, numbers in texts.items()} for pattern, texts in by_pattern.items()
    }


class _Describer:
    """A writer of attributes as plain data. Objects and classes are described once and named from then on."""

    def __init__(self, root: nn.Module) -> None:
        self._paths = {id(each): path for path, each in root.named_modules()}
        self._weights = {id(tensor): name for name, tensor in (*root.named_parameters(), *root.named_buffers())}
        self._inside: list[types.FunctionType] = []  # functions being described, the outermost first
        self._labels: dict[type, str] = {}
        self._names: dict[int, str] = {}  # of objects
        self._alive: list[Any] = []  # objects whose ids are in `_names`
        self.objects: dict[str, Any] = {}
        self.classes: dict[str, Any] = {}

    def module(self, path: str, module: nn.Module) -> dict[str, Any]:
        """Return the facts of `module`, whose name in the model is `path`, by attribute."""
        facts: dict[str, Any] = {"class": self._class(type(module)), "training": module.training}
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE and not _is_excluded(type(module), name):
                facts[f".{name}"] = self.value(value, f"{path}.{name}".lstrip("."))
        for name in _HOOKS:
            hooks = getattr(module, name)
            if hooks:
                facts[name] = [self.value(hook, f"{path}.{name}") for hook in hooks.values()]
        return facts

    def value(self, value: Any, where: str) -> Any:
        """Return `value` as plain data. Raises `KeyFactorError`, naming `where`, for a type no key can be made of."""
        if value is None or type(value) in (bool, int, str, float, bytes):
            return plain(value)
        if isinstance(value, enum.Enum):
            return plain(value)
        if id(value) in self._weights:
            return f"tensor {self._weights[id(value)]}"
        match value:
            case torch.Tensor():
                return self._tensor(value, where)
            case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
                return str(value)
            case nn.Module():
                return self._submodule(value, where)
            case list() | tuple() | set() | frozenset() | Mapping():
                return self._collection(value, where)
            case type():
                return f"class {self._class(value)}"
            case types.ModuleType():
                return f"module {value.__name__}"
            case functools.partial():
                inner = [self.value(part, where) for part in (value.func, value.args, value.keywords)]
                return ["partial", *inner]
            case re.Pattern():
                return ["pattern", value.pattern, value.flags]
            case logging.Logger():
                return f"logger {value.name}"
            case _ if isinstance(value, _LOCKS):
                return "lock"
            case weakref.ReferenceType():
                return ["weak", self.value(value(), where)]
            case _ if callable(value) and not hasattr(type(value), "forward"):
                found = self._function(value, where)
                if found is not None:
                    return found
        return self._object(value, where)

    def _collection(self, value: Any, where: str) -> Any:
        """Return the items of a collection, with class and attributes where the class is derived from Python's."""
        if isinstance(value, set | frozenset):
            items: list[Any] = sorted((self.value(item, where) for item in value), key=repr)
        elif isinstance(value, Mapping):
            items = [[self.value(key, where), self.value(item, f"{where}[{key!r}]")] for key, item in value.items()]
        else:
            items = [self.value(item, f"{where}[{number}]") for number, item in enumerate(value)]
        if type(value) in (list, tuple, dict, set, frozenset, OrderedDict):
            return items
        attributes = [
            [name, self.value(item, f"{where}.{name}")] for name, item in getattr(value, "__dict__", {}).items()
        ]
        return [f"class {_class_name(type(value))}", items, attributes]

    def _tensor(self, tensor: torch.Tensor, where: str) -> Any:
        _refuse_without_strides(tensor, where)
        num_bytes = tensor.numel() * tensor.element_size()
        if tensor.device.type == "meta" or isinstance(tensor, FakeTensor) or num_bytes > MAX_TENSOR_BYTES:
            raise KeyFactorError(
                f"{where} is a tensor of {num_bytes} bytes that is neither a parameter nor a buffer, and a trace "
                "may have its values in it; register it as a buffer."
            )
        try:
            values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        except (RuntimeError, TypeError) as error:  # conjugated, or of a class that computes in its own way
            kind = _class_name(type(tensor))
            raise KeyFactorError(f"{where} is a {kind} whose values cannot be read: {error}") from None
        return [_tensor_text(tensor), hashlib.sha256(values).hexdigest()]

    def _submodule(self, module: nn.Module, where: str) -> Any:
        if id(module) in self._paths:
            return f"submodule {self._paths[id(module)]!r}"
        raise KeyFactorError(f"{where} is a {_class_name(type(module))} that is not registered as a submodule.")

    def _function(self, function: Any, where: str) -> Any:
        """Describe a function by code, defaults and closure; return None for another callable object."""
        if isinstance(function, types.MethodType):
            return ["method", function.__name__, self.value(function.__self__, where)]
        if isinstance(function, types.FunctionType):
            name = f"{function.__module__}.{function.__qualname__}"
            if function in self._inside:
                return ["function around this", self._inside.index(function)]
            self._inside.append(function)
            closure = [self._cell(cell, where) for cell in function.__closure__ or ()]
            defaults = [self.value(each, where) for each in (function.__defaults__, function.__kwdefaults__)]
            attributes = {key: value for key, value in vars(function).items() if not key.startswith("__")}
            more = [self.value(attributes, where)] if attributes else []
            self._inside.pop()
            return ["function", name, code_digest(function.__code__), closure, defaults, *more]
        if isinstance(function, types.BuiltinFunctionType):
            name, owner = f"builtin {function.__module__}.{function.__qualname__}", function.__self__
            is_free = owner is None or isinstance(owner, types.ModuleType | type)
            return name if is_free else [name, self.value(owner, where)]
        if isinstance(function, OpOverload | OpOverloadPacket):
            return f"op {function}"
        wrapped = getattr(function, "__wrapped__", None)
        return ["wrapped", self.value(wrapped, where)] if isinstance(wrapped, types.FunctionType) else None

    def _cell(self, cell: types.CellType, where: str) -> Any:
        try:
            return self.value(cell.cell_contents, where)
        except ValueError:  # empty
            return "empty"

    def _object(self, value: Any, where: str) -> Any:
        """Describe an object of a class written in Python by its attributes, its whole state; return its name."""
        if id(value) in self._names:
            return self._names[id(value)]
        kind = type(value)
        if not all(map(_is_of_python, kind.__mro__)):
            raise KeyFactorError(f"{where} is a {_class_name(kind)}, of which no key can be made.")
        name = self._names[id(value)] = f"object {len(self._names)}"
        self._alive.append(value)
        label = self._class(kind)
        fields = dict(getattr(value, "__dict__", {}))
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            fields |= {name: getattr(value, name) for name in names if name not in fields}
        facts = {
            f".{key}": self.value(item, f"{where}.{key}") for key, item in fields.items() if not _is_excluded(kind, key)
        }
        self.objects[name] = {"class": label, **facts}
        return name

    def _class(self, kind: type) -> str:
        """Return the name of a class, numbered where another class has the same name, and describe the class once."""
        if kind not in self._labels:
            name = _class_name(kind)
            label = next(each for each in _numbered(name) if each not in self.classes)
            self._labels[kind] = label
            self.classes[label] = class_facts(kind)
        return self._labels[kind]


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name} {number}" for number in itertools.count(2))


def _is_excluded(kind: type, attribute: str) -> bool:
    if attribute in LOADING_ATTRIBUTES:
        return True
    return attribute in EXCLUDED and any(base.__module__.startswith("transformers.") for base in kind.__mro__)


def _is_of_python(kind: type) -> bool:
    """Return whether instances have no state but their attributes: the class adds room for nothing else to its base.

    Types written in C (`operator.itemgetter`, `array.array`, pybind11's) hide their state.
    """
    if kind in (object, types.SimpleNamespace) or dataclasses.is_dataclass(kind):
        return True
    base = kind.__base__
    assert base is not None, "only object has none"
    added = kind.__basicsize__ - base.__basicsize__
    for_attributes = sum(
        _POINTER_BYTES
        for offset in ("__dictoffset__", "__weakrefoffset__")
        if getattr(kind, offset) > 0 >= getattr(base, offset)  # 0 or less: Python keeps it in front of the instance
    )
    return not vars(kind).get("__slots__") and kind.__itemsize__ == 0 and added == for_attributes


def _registered(module: nn.Module, described: _Describer) -> dict[str, Any]:
    """Describe the attention functions that transformers has registered under the names in the configs of `module`."""
    registries = sys.modules.get("transformers.modeling_utils"), sys.modules.get("transformers.masking_utils")
    found: dict[str, Any] = {}
    for config in {id(c): c for each in module.modules() if (c := getattr(each, "config", None)) is not None}.values():
        name = getattr(config, "_attn_implementation", None)
        if not isinstance(name, str) or name in found:
            continue
        functions = [
            getattr(home, registry, {}).get(name)
            for home, registry in zip(
                registries, ("ALL_ATTENTION_FUNCTIONS", "ALL_MASK_ATTENTION_FUNCTIONS"), strict=True
            )
        ]
        found[name] = [described.value(function, f"attention {name!r}") for function in functions]
    return found


def _class_name(kind: type | Callable[..., Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
