"""The dispatcher of a start that serves before its graphs are captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.cudagraphs.dispatcher import Agree, Dispatched, Dispatcher
from piecegraph.runner.cudagraphs.policy import ResolvedMode

Bucket = tuple[CUDAGraphMode, BatchDescriptor]


class LateDispatcher(Dispatcher):
    """A dispatcher over the graphs captured so far, which counts the batches that wait for each of the others."""

    def __init__(
        self,
        *,
        full: Iterable[BatchDescriptor],
        piecewise: Iterable[BatchDescriptor],
        resolved: ResolvedMode,
        failed: Mapping[Bucket, str],
        planned: Dispatcher,
        waiting: Counter[Bucket],
    ) -> None:
        """Make the tables of what is captured.

        `planned`: the dispatcher over all graphs that will be captured. `waiting`: the counts by graph, which
        `dispatch` changes.
        """
        super().__init__(full=full, piecewise=piecewise, resolved=resolved, failed=failed)
        self._planned = planned
        self._waiting = waiting

    def dispatch(
        self,
        *,
        num_tokens: int,
        num_reqs: int,
        uniform_token_count: int | None,
        num_active_loras: int = 0,
        agree: Agree | None = None,
        at_most: CUDAGraphMode = CUDAGraphMode.FULL,
    ) -> Dispatched:
        """Return what a batch runs under now, and count the graph that it will run under later if that is another."""
        found = super().dispatch(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            uniform_token_count=uniform_token_count,
            num_active_loras=num_active_loras,
            agree=agree,
            at_most=at_most,
        )
        later = self._planned.dispatch(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            uniform_token_count=uniform_token_count,
            num_active_loras=num_active_loras,
            at_most=at_most,
        )
        if (later.mode, later.descriptor) == (found.mode, found.descriptor) or later.mode is CUDAGraphMode.NONE:
            return found
        self._waiting[later.mode, later.descriptor] += 1
        reason = f"start='fast' has not captured {later.mode.value} for {later.descriptor.num_tokens} tokens yet"
        return found if found.reason is None else found._replace(reason=reason)
