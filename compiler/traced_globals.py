"""Globals that a trace read, with what they were: nothing else tells that a setting of a module has changed, or that
a function was put in another's place."""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from piecegraph.compiler.dynamo import guard_name

_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<index>\d+)\]|\['(?P<key>[^'\\]*)'\]")
_GLOBAL = re.compile(r"G\['__import_(?P<module>\w+)'\](?P<path>(?:\.\w+|\[\d+\]|\['[^'\\]*'\])+)")
"""What Dynamo calls a global of a module other than the one where the trace began."""


@dataclass(frozen=True, slots=True)
class GlobalFact:
    """One global, and as much of it as can be told again in another process."""

    module: str
    path: str  # ".EPS", ".scale.__defaults__[0]", ".TABLE['key']"
    fact: str


@dataclass(frozen=True, slots=True)
class GlobalsRead:
    """What a trace's guards say of globals."""

    facts: tuple[GlobalFact, ...]
    files: tuple[str, ...]  # source files of the functions and classes among them


def globals_read(guards: Iterable[Any]) -> GlobalsRead:
    """Of Dynamo's guards, those on globals whose value says all there is to it."""
    modules = {name.replace(".", "_dot_"): name for name in list(sys.modules)}
    facts: dict[tuple[str, str], GlobalFact] = {}
    files: set[str] = set()
    for guard in guards:
        if not guard.has_value:
            continue
        file = _file_of(guard.value)
        if file is not None:
            files.add(file)
        found = _GLOBAL.fullmatch(guard_name(guard))
        fact = _fact(guard.value)
        if found is None or fact is None or found["module"] not in modules:
            continue
        name = modules[found["module"]]
        if _fact_at(name, found["path"]) is None:
            continue  # Dynamo's way to it is not ours: it would seem to have changed each time
        facts.setdefault((name, found["path"]), GlobalFact(name, found["path"], fact))
    return GlobalsRead(tuple(facts.values()), tuple(sorted(files)))


def changed_global(facts: Sequence[GlobalFact]) -> str | None:
    """The first global that is not what it was, as `module.path`; None: all are."""
    for each in facts:
        if _fact_at(each.module, each.path) != each.fact:
            return each.module + each.path
    return None


def _fact_at(module: str, path: str) -> str | None:
    """What is there now; None where nothing is, or more than can be written down."""
    try:
        value: Any = importlib.import_module(module)
        for step in _STEP.finditer(path):
            if step["name"] is not None:
                value = getattr(value, step["name"])
            else:
                value = value[int(step["index"]) if step["index"] is not None else step["key"]]
    except (ImportError, AttributeError, LookupError, TypeError):
        return None
    return _fact(value)


def _fact(value: Any) -> str | None:
    """What tells `value` from another one; None where that is more than can be written down."""
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if type(value) is float:
        return value.hex()
    if type(value) in (tuple, frozenset):
        facts = [_fact(item) for item in value]
        kind = type(value).__name__
        return None if None in facts else f"{kind} {sorted(map(str, facts)) if kind == 'frozenset' else facts}"
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__} {code_digest(value.__code__)}"
    if isinstance(value, type | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    return None


def code_digest(code: types.CodeType) -> str:
    """Of what a function does; its lines and files are no part of it."""
    text = hashlib.sha256(code.co_code)
    for constant in code.co_consts:
        text.update((code_digest(constant) if isinstance(constant, types.CodeType) else _constant(constant)).encode())
    text.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    return text.hexdigest()[:16]


def _constant(value: Any) -> str:
    """Sets have no order that lasts from process to process."""
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _file_of(value: Any) -> str | None:
    """The source file of a function or a class written in Python."""
    if not isinstance(value, type | types.FunctionType):
        return None
    file = getattr(sys.modules.get(value.__module__ or ""), "__file__", None)
    return file if file is not None and file.endswith(".py") else None
