"""The one ambient value is set by one `with`, ends with it, and does not nest."""

from __future__ import annotations

import dataclasses

import pytest

from piecegraph.runner.attention.interface.forward_context import (
    ForwardContext,
    get_forward_context,
    set_forward_context,
)
from piecegraph.runner.attention.sdpa import SdpaImpl
from tests.runner.attention.paged_case import make_case


def context() -> ForwardContext:
    return ForwardContext(impl=SdpaImpl(), metadata=make_case(lens=[(0, 1)]).metadata, kv_caches={})


def test_the_context_ends_with_the_block_even_when_that_raises() -> None:
    mine = context()
    with set_forward_context(mine):
        assert get_forward_context() is mine
    with pytest.raises(KeyError), set_forward_context(mine):
        raise KeyError
    with pytest.raises(AssertionError, match="outside of set_forward_context"):
        get_forward_context()


def test_contexts_do_not_nest() -> None:
    with (
        set_forward_context(context()),
        pytest.raises(AssertionError, match="do not nest"),
        set_forward_context(context()),
    ):
        pass


def test_a_layer_reads_the_metadata_of_its_group() -> None:
    first, second = make_case(lens=[(0, 1)]).metadata, make_case(lens=[(3, 1)]).metadata
    one = context()
    assert one.metadata_of("any") is one.metadata
    several = dataclasses.replace(one, metadata=first, group_metadata=(first, second), group_of={"near": 0, "far": 1})
    assert several.metadata_of("near") is first and several.metadata_of("far") is second


def test_the_context_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        context().cudagraph_mode = "FULL"  # type: ignore[misc]
