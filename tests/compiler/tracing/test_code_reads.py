"""Bytecode gives the names that a function reads."""

from __future__ import annotations

import io
import sys
import types

import torch

from piecegraph.compiler.tracing.code_reads import (
    first_absent,
    global_chains,
    imported_modules,
    is_function_of_state,
    registered_classes,
    registered_fact,
    result_fact,
    values_along,
)


def reader() -> object:
    import json.decoder

    return json.decoder, types.SimpleNamespace, settings.scale  # type: ignore[name-defined]  # noqa: F821


def test_globals_are_read_with_their_attributes() -> None:
    assert global_chains(reader.__code__) == (("types", "SimpleNamespace"), ("settings", "scale"))
    assert imported_modules(reader.__code__) == ("json.decoder",)


def test_the_first_absent_name_is_found() -> None:
    home = {"settings": types.SimpleNamespace(by=2)}
    assert first_absent(home, ("settings", "by")) is None
    assert first_absent(home, ("settings", "scale")) == 1
    assert first_absent(home, ("other", "scale")) == 0


WITH_ARGUMENTS = {
    *("_assert", "_get_device_index", "get_device_properties", "get_autocast_dtype"),
    *("get_enum", "is_complex", "is_floating_point", "promote_types"),
}
"""Functions of Dynamo's list that cannot be called without arguments."""


def test_every_function_whose_call_dynamo_replaces_is_known() -> None:
    from torch._dynamo.polyfills import sys as replaced
    from torch._dynamo.variables.torch import constant_fold_functions

    found = [each for each in constant_fold_functions if each.__name__ not in WITH_ARGUMENTS]
    found += [getattr(sys, name) for name in replaced.__all__ if name.startswith("get")]
    assert len(found) > 15
    assert [each for each in found if not is_function_of_state(each)] == []
    assert not is_function_of_state(len) and not is_function_of_state(sys)


def test_a_function_of_state_is_described_by_its_result() -> None:
    assert result_fact(sys.getrecursionlimit) == str(sys.getrecursionlimit())
    assert result_fact(torch.get_default_dtype) == str(torch.get_default_dtype())
    assert result_fact(torch.distributed.get_rank) == "ValueError"  # there is no group


class Registered:
    pass


def test_of_classes_registered_with_a_library_those_outside_libraries_count() -> None:
    class Own(io.IOBase):
        pass

    assert registered_fact(io.IOBase) == "[]" and registered_classes(io.IOBase)
    Own.register(Registered)
    assert registered_fact(io.IOBase) == f"['{__name__}.Registered']"
    assert list(values_along({"io": io}, ("io", "IOBase", "absent"))) == [io, io.IOBase]
