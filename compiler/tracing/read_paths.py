"""Places of values that a trace read: a tree of steps from a module, which another process can follow too.

Dynamo names guarded values by Python expressions (`G['__import_settings'].TABLE['key'].scale`). They are parsed here
and never evaluated: only a few kinds of steps are known, and an expression that needs another has no place.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Step = tuple[str, Any]
"""A kind of step and its argument, as plain data: see `_at` and `_STEPS`."""

HOME = "piecegraph.compiler.tracing.trace"
"""The module in which a trace begins: globals that Dynamo names without a module are in this module."""

_TORCH_BY_ID = re.compile(r"_\d+_c\d+")
"""The global by which Dynamo names torch where the code of a model asks for the type of a tensor. It has the id of the
module, which is another in each process."""


class UnknownReadExpression(Exception):
    """An error for an expression that needs an unknown step. The message is the expression."""


@dataclass(slots=True)
class ReadTree:
    """A list of places, each one step from an earlier place. The parent of a root is -1."""

    nodes: list[tuple[int, Step]] = field(default_factory=list)
    _known: dict[tuple[int, Step], int] = field(default_factory=dict)

    def add(self, parent: int, step: Step) -> int:
        """Return the index of the place that is `step` from `parent`, and add the place if it is new."""
        found = self._known.get((parent, step))
        if found is None:
            found = self._known[parent, step] = len(self.nodes)
            self.nodes.append((parent, step))
        return found

    def place(self, expression: str, modules: Mapping[str, str]) -> int | None:
        """Return the index of the place that Dynamo calls `expression`; None for one in the arguments of the call.

        `modules`: names of modules by Dynamo's names for them. Raises `UnknownReadExpression`.
        """
        try:
            return self._place(ast.parse(expression, mode="eval").body, modules)
        except (SyntaxError, ValueError, UnknownReadExpression):
            raise UnknownReadExpression(expression) from None

    def _place(self, node: ast.expr, modules: Mapping[str, str]) -> int | None:
        match node:
            case ast.Name(id="args" | "kwargs" | "sized"):
                return None
            case ast.Name(id="module"):
                return self.add(-1, ("self", None))
            case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str(name))):
                return self._place(ast.Name(id=name), modules)
            case ast.Subscript(value=ast.Name(id="G"), slice=ast.Constant(value=str(name))):
                return self._global(name, modules)
            case ast.Attribute(value=owner, attr=name):
                return self._step(owner, ("attribute", name), modules)
            case ast.Subscript(value=ast.Call(ast.Name(id="list"), args=[inner]), slice=ast.Constant(value=int(at))):
                match inner:  # a set's order differs between processes
                    case ast.Call(ast.Attribute(ast.Name(id="dict"), "keys"), args=[owner]):
                        return self._step(owner, ("key", at), modules)
            case ast.Subscript(value=owner, slice=key):
                return self._item(owner, key, modules)
            case ast.Call(func=function, args=arguments, keywords=[]):
                return self._call(ast.unparse(function), arguments, modules)
        raise UnknownReadExpression

    def _global(self, name: str, modules: Mapping[str, str]) -> int:
        if name.startswith("__builtins_dict__"):
            return self.add(-1, ("builtins", None))
        if name.startswith("__import_"):
            if (module := modules.get(name.removeprefix("__import_"))) is None:
                raise UnknownReadExpression
            return self.add(-1, ("module", module))
        if _TORCH_BY_ID.fullmatch(name):
            return self.add(-1, ("module", "torch"))
        if name.startswith("__"):
            raise UnknownReadExpression  # a name that Dynamo made for this process
        return self.add(self.add(-1, ("module", HOME)), ("attribute", name))

    def _item(self, owner: ast.expr, key: ast.expr, modules: Mapping[str, str], kind: str = "item") -> int | None:
        try:
            step: Step = (kind, _checked_key(ast.literal_eval(key)))
        except ValueError:
            at = self._place(key, modules)
            if at is None:
                raise UnknownReadExpression from None
            step = (f"{kind} at", at)
        return self._step(owner, step, modules)

    def _call(self, function: str, arguments: Sequence[ast.expr], modules: Mapping[str, str]) -> int | None:
        match function, arguments:
            case (("object.__getattribute__" | "getattr"), [owner, ast.Constant(value=str(name))]):
                return self._step(owner, ("own attribute" if function != "getattr" else "attribute", name), modules)
            case (("list.__getitem__" | "tuple.__getitem__"), [owner, ast.Constant(value=int(at))]):
                return self._step(owner, ("list item", at), modules)
            case (("dict.__getitem__" | "___odict_getitem"), [owner, key]):
                return self._item(owner, key, modules, "dict item")
            case _, [owner] if function in _CALLS:
                return self._step(owner, ("call", function), modules)
        if not arguments and function.endswith(".__subclasses__"):
            owner = ast.parse(function.removesuffix(".__subclasses__"), mode="eval").body
            return self._step(owner, ("call", "__subclasses__"), modules)
        if not arguments:
            return self._step(ast.parse(function, mode="eval").body, ("dereferenced", None), modules)
        raise UnknownReadExpression

    def _step(self, owner: ast.expr, step: Step, modules: Mapping[str, str]) -> int | None:
        parent = self._place(owner, modules)
        return None if parent is None else self.add(parent, step)

    def root(self, index: int) -> str:
        """Return the name of the module in which a place lies; "" for the compiled module and for builtins."""
        parent, (kind, argument) = self.nodes[index]
        if parent >= 0:
            return self.root(parent)
        return str(argument) if kind == "module" else ""

    def name(self, index: int) -> str:
        """Return the name of a place for people: `settings.TABLE['key'].scale`."""
        parent, (kind, argument) = self.nodes[index]
        owner = self.name(parent) if parent >= 0 else ""
        match kind:
            case "self":
                return "the module"
            case "module":
                return str(argument)
            case "builtins":
                return "builtins"
            case "op":
                return f"op {argument}"
            case "hash seed":
                return "the order of strings in a set (PYTHONHASHSEED)"
            case "attribute" | "own attribute":
                return f"{owner}.{argument}"
            case "call":
                return f"{str(argument).strip('_')}({owner})"
            case "key":
                return f"key {argument} of {owner}"
            case "item at" | "dict item at":
                return f"{owner}[{self.name(argument)}]"
            case "dereferenced":
                return f"{owner}()"
        return f"{owner}[{argument!r}]"


def modules_by_dynamo_name() -> dict[str, str]:
    """Return the names of imported modules by Dynamo's names for them, without those that it cannot distinguish."""
    found: dict[str, str] = {}
    for name in list(sys.modules):
        short = name.replace(".", "_dot_")
        found[short] = "" if short in found else name
    return {short: name for short, name in found.items() if name}


def _checked_key(key: Any) -> Any:
    """Return `key` if it is plain data. Raises `ValueError` otherwise."""
    if type(key) is tuple:
        for item in key:
            _checked_key(item)
    elif key is not None and type(key) not in (bool, int, str, bytes):
        raise ValueError
    return key


_CALLS: Mapping[str, Callable[[Any], Any]] = {
    "type": type,
    "dict": dict,
    "__subclasses__": lambda value: value.__subclasses__(),
    "___from_numpy": lambda value: torch.as_tensor(value),
    "___namedtuple_fields": lambda value: value._fields,
}

_STEPS: Mapping[str, Callable[[Any, Any], Any]] = {
    "attribute": getattr,
    "own attribute": object.__getattribute__,
    "item": lambda owner, key: owner[key],
    "list item": lambda owner, at: (list if isinstance(owner, list) else tuple).__getitem__(owner, at),
    "dict item": lambda owner, key: dict.__getitem__(owner, key),
    "key": lambda owner, at: list(dict.keys(owner))[at],
    "call": lambda owner, function: _CALLS[function](owner),
}


class Missing:
    """The type of `MISSING`, the value of a place where nothing is."""


MISSING = Missing()


def resolve_places(nodes: Sequence[tuple[int, Step]], root: Any) -> list[Any]:
    """Return the value at each place now, for the compiled module `root`; `MISSING` where there is none.

    Imports modules that are not imported yet, except those of torch: a module that was not imported was not changed,
    and a place in one is `UNTOUCHED`.
    """
    values: list[Any] = []
    for parent, step in nodes:
        values.append(_at(values, parent, step, root))
    return values


class Untouched:
    """The type of `UNTOUCHED`, the value of every place in a module of torch that is not imported yet."""


UNTOUCHED = Untouched()


def _at(values: Sequence[Any], parent: int, step: Step, root: Any) -> Any:
    kind, argument = step
    owner = values[parent] if parent >= 0 else None
    if isinstance(owner, Missing | Untouched):
        return owner
    try:
        match kind:
            case "self":
                return root
            case "builtins":
                return vars(builtins)
            case "op":
                return argument
            case "hash seed":
                return hash(HOME)
            case "module":
                if argument.partition(".")[0] == "torch" and argument not in sys.modules:
                    return UNTOUCHED
                return sys.modules.get(argument) or importlib.import_module(argument)
            case "item at" | "dict item at":
                return _STEPS[kind.removesuffix(" at")](owner, values[argument])
            case "dereferenced":
                return owner() if isinstance(owner, weakref.ReferenceType) else MISSING
        return _STEPS[kind](owner, argument)
    except Exception:  # a property, or a module's `__getattr__`, may raise anything
        return MISSING


def has_no_stable_identity(value: Any) -> bool:
    """Return whether the identity of `value` means nothing: each read may give another object, or equality suffices."""
    return type(value) in _WITHOUT_IDENTITY or isinstance(
        value, type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType | types.MethodType
    )


_WITHOUT_IDENTITY = frozenset({type(None), bool, int, float, complex, str, bytes, tuple, frozenset})
