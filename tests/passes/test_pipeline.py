"""The passes that run, and their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import fx

from piecegraph.config import PASSES
from piecegraph.passes import pipeline as of_pipeline
from piecegraph.passes.kernels.cpu import int8_rows
from piecegraph.passes.matching.graph_pass import GraphPass, PassContext, PassResult
from piecegraph.passes.pipeline import (
    NOT_ON_INTEL,
    OF_RANKS,
    ON_A_CPU,
    ON_A_GPU,
    WITH_OUR_KERNEL,
    all_passes,
    default_passes,
    pipeline,
)


@dataclass(frozen=True)
class Mine(GraphPass):
    name: ClassVar[str] = "mine"

    def apply(self, graph: fx.Graph, context: PassContext) -> PassResult:
        return PassResult()


def names(passes: tuple[GraphPass, ...]) -> list[str]:
    return [each.name for each in passes]


def test_the_names_a_config_may_have_are_those_of_the_passes() -> None:
    """`config` imports no torch, so it has a list of its own."""
    assert tuple(names(all_passes())) == PASSES


def test_every_pass_is_a_value() -> None:
    assert all_passes() == all_passes()
    assert len({each.uuid() for each in all_passes()}) == len(PASSES)


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("is_intel", [False, True])
def test_the_default_passes_are_those_that_pay_off_on_the_device(
    is_intel: bool, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor without what our kernel needs, layers over int8 weights stay as they are."""
    monkeypatch.setattr(of_pipeline, "is_intel", lambda: is_intel)
    instructions = frozenset(int8_rows.KERNEL.instructions if has_kernel else ("avx512bw",))
    monkeypatch.setattr(of_pipeline, "cpu_instructions", lambda: instructions)
    not_on_a_cpu = ON_A_GPU | (NOT_ON_INTEL if is_intel else frozenset())
    not_on_a_cpu |= frozenset() if has_kernel else WITH_OUR_KERNEL
    assert names(default_passes("cuda", num_ranks=2)) == [name for name in PASSES if name not in ON_A_CPU]
    assert pipeline(None, "cuda") == default_passes("cuda")
    assert names(default_passes("cuda")) == [name for name in PASSES if name not in OF_RANKS | ON_A_CPU]
    assert names(pipeline(None, "cpu")) == [name for name in PASSES if name not in not_on_a_cpu]
    assert default_passes("cpu", num_ranks=2) == pipeline(None, "cpu")
    assert set(PASSES) >= ON_A_GPU >= OF_RANKS
    assert set(PASSES) - ON_A_GPU >= ON_A_CPU >= NOT_ON_INTEL | WITH_OUR_KERNEL


def test_named_ones_run_in_our_order_and_the_callers_after_them() -> None:
    assert names(pipeline([Mine(), *reversed(PASSES)], "cpu")) == [*PASSES, "mine"]
    assert pipeline([], "cuda") == ()
