"""Facts differ for values that a trace would distinguish, and are the same in every process."""

from __future__ import annotations

import enum
import functools
import itertools
import math
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch

from piecegraph.compiler.tracing.guards import _VALUE
from piecegraph.compiler.tracing.read_facts import (
    FACTS,
    KIND_OF_GUARD,
    NotComparable,
    code_digest,
    contents_fact,
    identity_fact,
    keys_fact,
    length_fact,
    tensor_fact,
    value_fact,
)


class Kind(enum.Enum):
    A = 1
    B = 2


class Number(int):
    pass


VALUES: list[Any] = [
    *(None, 0, 0.0, -0.0, False, True, 1, 1.0, 1j, "1", b"1", (1,), [1], {1}, frozenset({1}), {1: 2}, {"1": 2}, ()),
    *({1: 2, 3: 4}, {3: 4, 1: 2}, math.inf, Kind.A, Kind.B, Number(1), range(2), slice(2), re.compile("a")),
    *(torch.float32, torch.device("cpu"), torch.Size([1]), np.float32(1), np.float64(1), np.dtype("float32")),
    *(math.sin, len, int, Kind, enum, torch.relu, torch.ops.aten.relu, torch.ops.aten.relu.default, {}.get, {1: 2}.get),
]


def test_different_values_have_different_facts() -> None:
    facts = [value_fact(value) for value in VALUES]
    for (a, left), (b, right) in itertools.combinations(zip(VALUES, facts, strict=True), 2):
        assert left != right, (a, b)
    assert not any(re.search("0x[0-9a-f]{6,}", fact) for fact in facts), "an address is of one process"


@pytest.mark.parametrize("value", [threading.Lock(), torch.ones(1), [threading.Lock()]])
def test_a_value_without_a_complete_description_is_refused(value: Any) -> None:
    with pytest.raises(NotComparable):
        value_fact(value)


def test_functions_are_identified_by_their_code() -> None:
    def make(by: int) -> Any:
        return lambda x: x * by

    assert identity_fact(make(1)) == identity_fact(make(2)), "closures are places of their own"
    assert code_digest((lambda: 0.0).__code__) != code_digest((lambda: -0.0).__code__)
    assert identity_fact(functools.lru_cache(make)) == f"cache of {identity_fact(make)}"
    with pytest.raises(NotComparable, match="assume_constant_result"):
        identity_fact(torch._dynamo.assume_constant_result(make))


def test_parts_of_values() -> None:
    assert length_fact([1, 2]) == "builtins.list of 2"
    assert keys_fact({1: 2, "a": 3}) == "builtins.dict ['1', \"'a'\"]"
    assert (
        tensor_fact(torch.ones(2))
        == tensor_fact(torch.zeros(2))
        == tensor_fact(torch.nn.Parameter(torch.ones(2), False))
    )
    assert tensor_fact(torch.ones(2)) != tensor_fact(torch.ones(2).double())
    assert contents_fact(torch.zeros(2)) != contents_fact(torch.tensor([0.0, -0.0]))
    assert contents_fact(torch.ones(2, 3).t()) == contents_fact(torch.ones(2, 3).t().clone())
    with pytest.raises(NotComparable):
        contents_fact(torch.ones(2, device="meta"))
    with pytest.raises(NotComparable):
        tensor_fact(torch.ones(2).to_sparse())


def test_every_kind_of_guard_has_a_fact_or_is_refused() -> None:
    assert set(KIND_OF_GUARD.values()) <= set(FACTS)
    refused = {"COUNT_ITERATOR_MATCH", "RANGE_ITERATOR_MATCH", "TUPLE_ITERATOR_LEN", "WEAKREF_ALIVE"}
    assert set(_VALUE) - set(KIND_OF_GUARD) == {*refused, "DUPLICATE_INPUT"}
