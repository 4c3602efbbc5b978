"""Keys: every factor counts, nothing without a canonical form is taken, and a difference has a path."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piecegraph.cache.disk.canonical import canonical_json, parse_canonical
from piecegraph.cache.disk.layout import is_digest
from piecegraph.cache.store.keys import (
    EXCLUDED,
    MISSING,
    FactorDifference,
    config_factors,
    diff_factors,
    key_of,
    plain,
)
from piecegraph.config import CompileConfig
from piecegraph.errors import KeyFactorError


class Mode(enum.IntEnum):
    FAST = 1


@dataclass(frozen=True)
class Options:
    level: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class OtherOptions:
    level: int
    names: tuple[str, ...] = ()


DISTINCT = [
    *(1, 1.0, True, "1", None, 0, 0.0, -0.0, False, "", [], {}, "None", b"", b"1", [1], [[1]], {"a": 1}, {"a": None}),
    *(float("inf"), float("-inf"), "inf", set(), {1}, Mode.FAST, Options(1), OtherOptions(1), Options(1, ("a",))),
    *(1e-5, 1e-6, {"a": {"b": 1}}, {"a.b": 1}, "é", "e\u0301"),
]


def test_values_that_differ_make_keys_that_differ() -> None:
    """Values that Python calls equal make other keys too: 1, 1.0, True and an IntEnum trace differently."""
    keys = [key_of({"factor": value}) for value in DISTINCT]
    assert len(set(keys)) == len(DISTINCT)
    assert all(is_digest(key) for key in keys)


def test_order_of_names_and_members_is_no_factor() -> None:
    assert key_of({"a": 1, "b": {"x", "y"}}) == key_of({"b": {"y", "x"}, "a": 1})
    assert key_of({"a": (1, 2)}) == key_of({"a": [1, 2]})
    assert key_of({"a": [1, 2]}) != key_of({"a": [2, 1]})


def test_a_key_never_changes_between_versions() -> None:
    """A change here makes every cache cold: let it be on purpose."""
    assert key_of({"eps": 1e-6}) == "35b696a27a2254986fe506b10d69ff26b781098aafa86e983e587da17c3d9fff"


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": {"b": [0, object()]}}, r"factor a.b\[1\] is <object"),
        ({"a": Options}, "factor a is <class"),
        ({"a": Options(level=len)}, "factor a.level is <built-in"),  # type: ignore[arg-type]
        ({"a": float("nan")}, "factor a is NaN"),
        ({"a": {1: 2}}, "factor a is a mapping with the key 1"),
        ({"a": {"$float": 1, "x": 2}}, r"the key '\$float'"),
        ({"a": 1j}, "of type builtins.complex"),
        ({"a": type("Int", (int,), {})(3)}, "factor a is 3, of type"),
    ],
)
def test_a_factor_without_a_form_is_an_error_that_names_it(value: Any, path: str) -> None:
    with pytest.raises(KeyFactorError, match=path):
        key_of(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text().filter(lambda s: s[:1] != "$"), inner),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(JSON, JSON)
def test_plain_json_is_its_own_form_and_equal_keys_mean_no_difference(left: Any, right: Any) -> None:
    assert plain(left) == left
    assert parse_canonical(canonical_json(left)) == left
    assert not diff_factors(left, left)
    assert (diff_factors({"x": left}, {"x": right}) == ()) == (key_of({"x": left}) == key_of({"x": right}))


@pytest.mark.parametrize("value", DISTINCT)
def test_plain_values_stay_unchanged(value: Any) -> None:
    """An entry's factors make the entry's key again."""
    once = plain({"factor": value})
    assert plain(once) == once
    assert key_of(once) == key_of({"factor": value})


def test_a_difference_is_named_leaf_by_leaf() -> None:
    left = {"config": {"sizes": [1, 2], "eps": 1e-6}, "torch": "2.13", "same": [1]}
    right = {"config": {"sizes": [1, 4, 8], "eps": 1e-6}, "arch": {"cuda": 90}, "same": [1]}
    assert diff_factors(left, right) == (
        FactorDifference("arch", MISSING, {"cuda": 90}),
        FactorDifference("config.sizes[1]", 2, 4),
        FactorDifference("config.sizes[2]", MISSING, 8),
        FactorDifference("torch", "2.13", MISSING),
    )
    assert repr(MISSING) == "(not there)"


def test_a_number_and_its_other_type_differ() -> None:
    assert diff_factors({"a": 1}, {"a": True}) == (FactorDifference("a", 1, True),)


def test_one_name_in_place_of_another_is_one_difference() -> None:
    """Weights are named by what they are: another dtype is not a weight less and a weight more."""
    left, right = ({"weights": {"a.weight": {f"parameter {dtype}": "0 1"}}} for dtype in ("float32", "float16"))
    assert diff_factors(left, right) == (
        FactorDifference("weights.a.weight", {"parameter float32": "0 1"}, {"parameter float16": "0 1"}),
    )
    assert [each.path for each in diff_factors({"a": {"x": 1}}, {"a": {"x": 1, "y": 1}})] == ["a.y"]
    assert [each.path for each in diff_factors({"a": 1}, {"b": 1})] == ["a", "b"]


def test_attributes_have_one_dot_in_a_path() -> None:
    assert diff_factors({"norm": {".eps": 1}}, {"norm": {".eps": 2}}) == (FactorDifference("norm.eps", 1, 2),)


CHANGED = {
    "split_ops": ("a::b",),
    "compiler": "eager",
    "inductor_options": {"max_autotune": True},
    "compile_sizes": (1,),
    "compile_sizes_options": {},
    "compile_sizes_options_up_to": 1,
    "passes": ("fuse-moe",),
    "cache": False,
    "cache_dir": "somewhere",
    "signing_key_file": "somewhere",
    "compile_workers": 3,
    "dump_dir": "somewhere",
    "expect": {"fuse-moe": 1},
    "selfcheck": True,
    "strict": True,
}
"""For every field of the config a value that is not its default; a new field needs a line, or a reason in EXCLUDED."""


def test_every_field_of_the_config_is_in_the_key_or_excluded_with_a_reason() -> None:
    names = {field.name for field in dataclasses.fields(CompileConfig)}
    assert set(CHANGED) == names
    assert set(EXCLUDED) <= names
    assert all(len(reason) > 20 for reason in EXCLUDED.values())


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_field_makes_another_key_unless_a_reason_excludes_it(name: str) -> None:
    before = key_of(config_factors(CompileConfig()))
    after = key_of(config_factors(CompileConfig.from_options({name: CHANGED[name]})))
    assert (before == after) == (name in EXCLUDED)
