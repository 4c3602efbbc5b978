"""The allocator's settings, said again with one changed."""

from __future__ import annotations

import pytest
import torch

from piecegraph.compiler.graphs import growing_segments as module
from piecegraph.compiler.graphs.growing_segments import (
    as_the_program_set_it,
    growing_segments,
    is_on,
    turned,
)

GPU = torch.device("cuda", 0)
SETTINGS = "max_split_size_mb:512,garbage_collection_threshold:0.8"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("", False),
        (SETTINGS, False),
        ("expandable_segments:True", True),
        (f"{SETTINGS}, expandable_segments: True", True),
        ("expandable_segments:True,expandable_segments:False", False),
        ("expandable_segments:False", False),
    ],
)
def test_whether_they_grow_is_what_was_said_last(settings: str, expected: bool) -> None:
    assert is_on(settings) is expected


def test_other_settings_are_said_again() -> None:
    """Torch forgets those it is not told."""
    assert turned("", on=True) == "expandable_segments:True"
    assert turned(SETTINGS, on=True) == f"{SETTINGS},expandable_segments:True"
    assert turned(turned(SETTINGS, on=True), on=False) == f"{SETTINGS},expandable_segments:False"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's own allocator is told, in order; it was told `SETTINGS` before."""
    told = [SETTINGS]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(module, "allocator_settings", lambda: told[-1])
    monkeypatch.setattr(module, "has_virtual_memory", lambda index: True)
    return told


def test_they_grow_in_here_and_not_after(said: list[str]) -> None:
    def fail() -> None:
        with growing_segments(GPU):
            assert is_on(said[-1])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not is_on(said[-1]) and said[-1].startswith(SETTINGS)
    assert len(said) == 3


def test_a_program_that_has_them_keeps_them(said: list[str]) -> None:
    said.append("expandable_segments:True")
    with growing_segments(GPU):
        pass
    assert said == [SETTINGS, "expandable_segments:True"]


def test_another_allocator_is_left_alone(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with growing_segments(GPU):
        pass
    assert said == [SETTINGS]


def test_a_gpu_that_maps_no_memory_is_left_alone(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_virtual_memory", lambda index: False)
    with growing_segments(GPU):
        pass
    assert said == [SETTINGS]


@pytest.mark.parametrize("settings", ["", SETTINGS, f"{SETTINGS},expandable_segments:True"])
def test_what_is_left_behind_is_no_setting_of_the_programs(settings: str) -> None:
    """A key that had it in it would be another after the first capture."""
    assert as_the_program_set_it(settings) == settings
    if not is_on(settings):
        assert as_the_program_set_it(turned(settings, on=False)) == settings
