"""A backend is chosen by name; a name that cannot be honoured says why."""

from __future__ import annotations

import pytest

from piecegraph.errors import ConfigError
from piecegraph.runner.attention.backend import AttentionCGSupport
from piecegraph.runner.attention.select import select_backend


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_sdpa_is_what_there_is(name: str) -> None:
    assert select_backend(name).name == "sdpa"


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_a_planned_backend_says_that_it_is_not_there_yet(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend='{name}' is not available in this version; .*sdpa"):
        select_backend(name)


def test_an_unknown_backend_lists_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"attention_backend='spda' is unknown\. Did you mean 'sdpa'"):
        select_backend("spda")


def test_graph_support_is_ordered() -> None:
    """Each level includes those before it."""
    assert list(AttentionCGSupport) == sorted(AttentionCGSupport)
    assert AttentionCGSupport.NEVER < AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE < AttentionCGSupport.UNIFORM_BATCH
    assert AttentionCGSupport.UNIFORM_BATCH < AttentionCGSupport.ALWAYS
