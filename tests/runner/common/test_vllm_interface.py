"""The docs' table of vLLM's interface matches our signatures."""

from __future__ import annotations

import inspect

import pytest

from piecegraph import LLM
from piecegraph.errors import ConfigError
from piecegraph.runner.common import vllm_interface as vllm
from piecegraph.runner.offline.arguments import refuse_unknown
from tests import vllm_names
from tests.vllm_table import Section, sections, table, written


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.title)
def test_every_name_is_ours_or_says_what_to_do(section: Section) -> None:
    assert section.faults() == []


def test_the_page_has_the_table() -> None:
    assert written() == table(), "the table is out of date: run python -m tests.vllm_table"


@pytest.mark.parametrize("method", [name for name in vllm.VLLM_METHODS if inspect.isfunction(getattr(LLM, name, None))])
def test_methods_take_the_same_parameters(method: str) -> None:
    """Parameters are in vLLM's order, so that positional calls mean the same."""
    ours = [name for name in inspect.signature(getattr(LLM, method)).parameters if name not in ("self", "unknown")]
    assert ours == list(vllm.VLLM_METHODS[method])


def test_every_list_is_sorted_and_every_default_accepted() -> None:
    """At least one value of each argument has no effect, and older names are gone from vLLM."""
    for name, one in {**vllm.UNAVAILABLE_ARGUMENTS, **vllm.OLDER_ARGUMENTS}.items():
        assert one.instead.endswith("."), name
        for value in one.accepted:
            refuse_unknown({name: value}, ())
        if not one.accepts_any:
            with pytest.raises(ConfigError, match=f"^{name}=.* is not available here: "):
                refuse_unknown({name: object()}, ())
    assert not set(vllm.OLDER_ARGUMENTS) & set(vllm_names.VLLM_ARGUMENTS)
    for names in (vllm.UNAVAILABLE_ARGUMENTS, vllm.UNAVAILABLE_SAMPLING_PARAMS, vllm.UNAVAILABLE_METHODS):
        assert list(names) == sorted(names)
