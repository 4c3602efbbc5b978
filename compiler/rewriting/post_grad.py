"""Passes inside Inductor: one `post_grad_custom_post_pass` runs them all over a piece and records the outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import fx

from piecegraph.compiler.inductor.custom_pass import POST_GRAD_OPTION, custom_graph_pass
from piecegraph.compiler.rewriting.graph_snapshot import graph_text
from piecegraph.compiler.rewriting.pass_contexts import FixedInputs
from piecegraph.compiler.rewriting.run_pass import PassOutcome, run_pass
from piecegraph.config import CompileConfig
from piecegraph.passes.matching.graph_pass import GraphPass, Miss, Place
from piecegraph.passes.matching.pass_data import pass_as_data, pass_from_data


@dataclass(frozen=True, slots=True)
class PostGrad:
    """The passes that run inside Inductor, the same for every piece."""

    passes: tuple[GraphPass, ...] = ()
    wants_graphs: bool = False  # keep the graph before and after a pass that matched, as text

    @classmethod
    def of(cls, passes: Sequence[GraphPass], config: CompileConfig) -> PostGrad:
        """Select the passes that work inside Inductor."""
        found = tuple(each for each in passes if each.place is Place.POST_GRAD)
        return cls(found, config.dump_dir is not None)

    def as_data(self) -> dict[str, Any]:
        """Return plain data for another process. Raises `NotData` if a pass cannot be made again there."""
        passes = [pass_as_data(each) for each in self.passes]
        return {"passes": passes, "wants_graphs": self.wants_graphs}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> PostGrad:
        """Return the passes that `as_data` wrote. Raises `NotData`."""
        return cls(tuple(map(pass_from_data, data["passes"])), data["wants_graphs"])


@dataclass(frozen=True, slots=True)
class PostGradOutcome:
    """The outcome of one pass on one graph inside Inductor."""

    name: str  # of the pass
    outcome: PassOutcome
    before: str = ""  # the graph as text, where it matched and was wanted
    after: str = ""

    def as_data(self) -> dict[str, Any]:
        """Return plain data for another process, without exceptions and graphs."""
        return asdict(replace(self, outcome=replace(self.outcome, cause=None, before=None)))

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> PostGradOutcome:
        """Return the outcome that `as_data` wrote."""
        outcome = dict(data["outcome"])
        outcome["misses"] = tuple(Miss(**miss) for miss in outcome["misses"])
        return cls(data["name"], PassOutcome(**outcome), data["before"], data["after"])


class PostGradRun:
    """One compile of one piece. `outcomes` has one entry for each pass and each graph that Inductor passed to it."""

    def __init__(self, post_grad: PostGrad) -> None:
        self.post_grad = post_grad
        self.outcomes: list[PostGradOutcome] = []

    def options(self) -> dict[str, Any]:
        """Return the `torch._inductor.config` fields under which Inductor runs the passes."""
        passes = self.post_grad.passes
        if not passes:
            return {}
        uuid = "-".join(each.uuid() for each in passes)
        return {POST_GRAD_OPTION: custom_graph_pass(self._run, uuid)}

    def _run(self, graph: fx.Graph) -> None:
        for each in self.post_grad.passes:
            outcome = run_pass(each, graph, FixedInputs(), value_key="val")
            before = after = ""
            if outcome.before is not None and self.post_grad.wants_graphs:
                before, after = outcome.before.text(), graph_text(graph)
            self.outcomes.append(PostGradOutcome(each.name, replace(outcome, before=None), before, after))
