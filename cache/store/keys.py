"""Keys: the sha256 of plain factors, so that the difference of two keys can be explained."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from piecegraph.cache.disk.canonical import canonical_json
from piecegraph.errors import KeyFactorError

EXCLUDED: Mapping[str, str] = {
    "cache": "whether anything is kept, not what",
    "cache_dir": "where it is kept; a path of one machine",
    "compile_workers": "how many processes compile, not what they make",
    "dump_dir": "where text for people goes; a path of one machine",
    "expect": "checks what passes did; what they did is the same",
    "selfcheck": "compares what was compiled; compiles nothing else",
    "signing_key_file": "whose entries count; a path of one machine",
    "strict": "turns a failure into an error; what failed is not stored",
}
"""The fields of `CompileConfig` that are in no key, with the reason. Every other field is in every key."""


class Missing(enum.Enum):
    """The marker for the side of a difference that has no such factor."""

    MISSING = "missing"

    def __repr__(self) -> str:
        return "(not there)"


MISSING = Missing.MISSING


@dataclass(frozen=True, slots=True)
class FactorDifference:
    """A factor on which two keys disagree."""

    path: str  # "config.compile_sizes[0]"
    left: Any  # plain JSON, or MISSING
    right: Any


def key_of(factors: Mapping[str, Any]) -> str:
    """Return the key, 64 hexadecimal digits, of factors that `plain` accepts. Raises `KeyFactorError`."""
    return key_of_plain(plain(factors))


def key_of_plain(factors: Mapping[str, Any]) -> str:
    """Return the key of factors that `plain` has returned, e.g. of an entry's factors."""
    return hashlib.sha256(b"piecegraph key 1\n" + canonical_json(factors)).hexdigest()


def config_factors(config: Any, excluded: Mapping[str, str] = EXCLUDED) -> dict[str, Any]:
    """Return every field of the dataclass `config` that `excluded` does not name, as plain JSON.

    Raises `KeyFactorError`.
    """
    names = [field.name for field in dataclasses.fields(config)]
    return {name: _plain(getattr(config, name), name) for name in names if name not in excluded}


def plain(value: Any) -> Any:
    """Return `value` as JSON that has everything a key must know; plain JSON is returned unchanged.

    Tuples become lists; sets, bytes, enums, infinities and dataclasses become mappings whose keys begin with "$", as no
    other key may. Raises `KeyFactorError`, naming the path, for any other type, for NaN, and for mappings whose keys
    are not strings.
    """
    return _plain(value, "")


def _plain(value: Any, path: str) -> Any:
    # By exact type where a subclass could mean more than its value says (a bool is not an int, nor is an IntEnum).
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return _plain_float(value, path)
    if isinstance(value, enum.Enum):
        return {"$enum": [_class_name(type(value)), value.name]}
    if type(value) is bytes:
        return {"$bytes": value.hex()}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{path}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, set | frozenset):
        members = [_plain(each, f"{path}{{}}") for each in value]
        return {"$set": sorted(members, key=canonical_json)}
    if isinstance(value, Mapping):
        return _plain_mapping(value, path)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name), join_path(path, f.name)) for f in dataclasses.fields(value)}
        return {"$class": _class_name(type(value)), "$fields": fields}
    raise KeyFactorError(
        f"factor {path or 'itself'} is {value!r}, of type {_class_name(type(value))}; a key is made of str, int, "
        "float, bool, None, bytes, enums, dataclasses, and sequences, sets and mappings of them: say what matters of "
        "it in those."
    )


def _plain_float(value: float, path: str) -> Any:
    if math.isnan(value):
        raise KeyFactorError(f"factor {path or 'itself'} is NaN, which equals nothing; give a number or None.")
    return value if math.isfinite(value) else {"$float": str(value)}


_OUR_FORMS = ({"$enum"}, {"$bytes"}, {"$set"}, {"$float"}, {"$class", "$fields"})


def _plain_mapping(value: Mapping[Any, Any], path: str) -> dict[str, Any]:
    ours = set(value) in _OUR_FORMS  # what `plain` made comes back as it is
    found = {}
    for name, each in value.items():
        if type(name) is not str or (name.startswith("$") and not ours):
            raise KeyFactorError(
                f"factor {path or 'itself'} is a mapping with the key {name!r}; keys are strings that do not begin "
                "with '$'."
            )
        found[name] = _plain(each, join_path(path, name))
    return found


def join_path(path: str, name: str) -> str:
    """Return the path of factor `name` inside the one at `path`. Attributes of modules begin with a dot."""
    return f"{path}.{name}" if path and not name.startswith(".") else f"{path}{name}"


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def diff_factors(left: Any, right: Any) -> tuple[FactorDifference, ...]:
    """Return the differences of two plain values, leaf by leaf, in the order of paths; empty for equal keys.

    Two mappings that have one key each, and not the same one, are leaves: `{"float32": "0 1"}` and `{"float16": "0
    1"}`.
    """
    return tuple(_differences(left, right, ""))


def _differences(left: Any, right: Any, path: str) -> list[FactorDifference]:
    if isinstance(left, dict) and isinstance(right, dict) and not (path and _is_one_for_another(left, right)):
        names = sorted({*left, *right})
        pairs = [(left.get(name, MISSING), right.get(name, MISSING), join_path(path, name)) for name in names]
    elif isinstance(left, list) and isinstance(right, list):
        both = enumerate(itertools.zip_longest(left, right, fillvalue=MISSING))
        pairs = [(a, b, f"{path}[{index}]") for index, (a, b) in both]
    else:
        same = left is right or (MISSING not in (left, right) and canonical_json(left) == canonical_json(right))
        return [] if same else [FactorDifference(path, left, right)]
    return [difference for a, b, at in pairs for difference in _differences(a, b, at)]


def _is_one_for_another(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return len(left) == len(right) == 1 and left.keys() != right.keys()
