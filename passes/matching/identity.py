"""The identity of a pass in cache keys: a hash of the source of its class and of its options."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import inspect
import secrets
import sys
from pathlib import Path
from typing import Any

from piecegraph import __version__

_OURS = "piecegraph.passes"


def uuid_of(graph_pass: object) -> str:
    """Return the hex digest of a pass's class, source and options.

    The digest is equal in every process that has the same sources. If a source cannot be read (a class typed at a
    prompt), the digest is equal in this process only. Options count by their repr: a repr with an address in it makes a
    key that no process finds again.
    """
    kind: type[Any] = type(graph_pass)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return _hex("\n".join((__version__, name, source_hash(kind), repr(options_of(graph_pass)))))


def options_of(graph_pass: object) -> dict[str, Any]:
    """Return the fields of a pass by name, in the order of their definition."""
    assert dataclasses.is_dataclass(graph_pass), f"{graph_pass!r} is checked to be a dataclass"
    return {field.name: getattr(graph_pass, field.name) for field in dataclasses.fields(graph_pass)}


def source_hash(kind: type[Any]) -> str:
    """Return the hash of every file that a class depends on: its own, those of its bases, and those named in `reads`.

    A built-in class depends on all of `passes/`, since passes share patterns, ops and kernels.
    """
    modules = [base.__module__ for base in kind.__mro__[:-1]]
    modules += [name for base in kind.__mro__ for name in vars(base).get("reads", ())]
    is_ours = kind.__module__.startswith(_OURS + ".")
    names = dict.fromkeys(name for name in modules if is_ours or not name.startswith(_OURS + "."))
    names.pop("abc", None)
    texts = [_source_of(name, kind) for name in names]
    if is_ours:
        texts.append(_source_of_ours())
    return _hex("\n".join(texts))


def _source_of(module: str, kind: type[Any]) -> str:
    try:
        return inspect.getsource(sys.modules.get(module) or importlib.import_module(module))
    except (OSError, TypeError):
        pass
    try:
        return inspect.getsource(kind)  # of a notebook's cell
    except (OSError, TypeError):
        return _token(f"{kind.__module__}.{kind.__qualname__} {id(kind)}")


@functools.cache
def _token(name: str) -> str:
    """Return a token that differs from that of every other process."""
    return secrets.token_hex()


@functools.cache
def _source_of_ours() -> str:
    folder = Path(__file__).parents[1]  # passes/
    return "\n".join(f"{file.relative_to(folder)}\n{file.read_text()}" for file in sorted(folder.rglob("*.py")))


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
