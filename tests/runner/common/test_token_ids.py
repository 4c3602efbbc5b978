"""Token ids come as lists, arrays and tensors of whole numbers; nothing else passes for one."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from piecegraph.errors import RequestError
from piecegraph.runner.common.token_ids import as_token_ids


@pytest.mark.parametrize(
    "given",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint16),
        torch.tensor([1, 2, 3]),
        torch.tensor([1, 2, 3], dtype=torch.int32),
        [np.int32(1), np.uint8(2), 3],
        [torch.tensor(1), torch.tensor([2]), 3],
        list(np.array([1, 2, 3])),
    ],
)
def test_integers_of_any_kind_become_ints(given: Any) -> None:
    """The result is a new list of plain ints."""
    found = as_token_ids("prompt_token_ids", given)
    assert found == [1, 2, 3] and found is not given
    assert {type(token) for token in found} == {int}


@pytest.mark.parametrize(
    "given",
    [
        [True],
        [1, False],
        np.array([True, False]),
        [np.bool_(True)],
        torch.tensor([True]),
        [torch.tensor(True)],
        [1.0],
        np.array([1.0]),
        [np.float32(1)],
        torch.tensor([1.5]),
        [None],
        ["1"],
        [b"1"],
        [[1, 2]],
        [torch.tensor([1, 2])],
    ],
)
def test_a_value_that_is_not_a_token_id_is_refused(given: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt_token_ids has token id .*; ids are whole numbers, 0 or more"):
        as_token_ids("prompt_token_ids", given)


@pytest.mark.parametrize("given", ["12", b"12", {1: 2}, 7, None])
def test_a_value_that_is_not_a_list_is_refused(given: Any) -> None:
    message = f"stop_token_ids={given!r}; it must be a list of token ids"
    with pytest.raises(RequestError, match=re.escape(message)):
        as_token_ids("stop_token_ids", given)


@pytest.mark.parametrize("given", [np.array([[1, 2]]), torch.tensor(3), torch.zeros(2, 2, dtype=torch.int64)])
def test_arrays_have_one_dimension(given: Any) -> None:
    with pytest.raises(RequestError, match=r"has shape \(.*\); token ids are an array of one dimension"):
        as_token_ids("prompt_token_ids", given)
