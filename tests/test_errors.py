"""Running out of memory is one error, on any device."""

from __future__ import annotations

import pytest
import torch

from piecegraph.errors import ConfigError, OutOfMemory, is_out_of_memory, shorten, translate_out_of_memory


def test_a_cpu_allocation_that_fails_is_out_of_memory() -> None:
    with pytest.raises(OutOfMemory, match="out of memory .*Lower max_model_len"), translate_out_of_memory():
        torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.parametrize("error", [RuntimeError("another one"), ConfigError("a value"), OutOfMemory("said already")])
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, translate_out_of_memory():
        raise error
    assert raised.value is error


def test_memory_errors_of_python_and_torch_are_known() -> None:
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("else"))


def test_long_texts_are_shortened_at_both_ends() -> None:
    assert shorten("a" * 80) == "a" * 80
    assert shorten("a" * 100 + "b" * 100) == "a" * 40 + "..." + "b" * 20
