"""`PoolingRunner`, which runs the model on a batch of texts and then pools, in two phases."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from piecegraph.compiler.graphs.capture import capture
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.graphs.graphs import Graphs
from piecegraph.progress import OnPhase
from piecegraph.runner.attention.interface.forward_context import clear_forward_context
from piecegraph.runner.cudagraphs.dispatch_counters import DispatchCounters, refuse_downgrade
from piecegraph.runner.cudagraphs.dispatcher import Dispatcher
from piecegraph.runner.cudagraphs.graph_plan import GraphPlan
from piecegraph.runner.pooling.step import PoolingStep, Text
from piecegraph.runner.step.without_grad import without_grad

TOKEN_ROWS_RUN_UNCAPTURED = "token_embed: every graph ends with a row for each text"


class PoolingRunner:
    """The owner of a pooling model's graphs. `execute_model` launches a batch, and `pool` returns its rows."""

    def __init__(
        self, *, step: PoolingStep, plan: GraphPlan, graphs: Graphs | None, dispatcher: Dispatcher, strict: bool
    ) -> None:
        self.step = step
        self.plan = plan
        self.graphs = graphs
        self.dispatcher = dispatcher
        self.counters = DispatchCounters()
        self._strict = strict
        self._pending: tuple[torch.Tensor, int] | None = None  # rows on the device, of which the first so many are real

    @without_grad
    def execute_model(self, texts: Sequence[Text], *, of_tokens: bool = False) -> None:
        """Launch the model on `texts`, which fit into a step, and the pooling of its hidden states.

        `of_tokens`: a row for each token is wanted. Such a step runs without graphs, also if the runner is strict,
        because graphs end with the rows of texts.
        """
        assert self._pending is None, "pool has not run since the last execute_model"
        num_tokens = sum(len(text.token_ids) for text in texts)
        if of_tokens:
            self._execute_of_tokens(texts, num_tokens)
            return
        dispatched = self.dispatcher.dispatch(num_tokens=num_tokens, num_reqs=len(texts), uniform_token_count=None)
        refuse_downgrade(dispatched, self._strict)
        self.counters.record(dispatched, num_tokens)
        metadata = self.step.buffers.fill(texts, dispatched.descriptor.num_tokens)
        if dispatched.mode is CUDAGraphMode.PIECEWISE:
            assert self.graphs is not None, "the dispatcher knows captured graphs only"
            with self.step.context(metadata):
                rows = self.graphs.replay(dispatched.descriptor)
        else:
            rows = self.step.pool(self.step.hidden_states(metadata))
        self._pending = rows, len(texts)

    def _execute_of_tokens(self, texts: Sequence[Text], num_tokens: int) -> None:
        dispatched = self.dispatcher.dispatch(
            num_tokens=num_tokens, num_reqs=len(texts), uniform_token_count=None, at_most=CUDAGraphMode.NONE
        )
        if dispatched.reason is not None:
            dispatched = dispatched._replace(reason=TOKEN_ROWS_RUN_UNCAPTURED)
        self.counters.record(dispatched, num_tokens)
        metadata = self.step.buffers.fill(texts, dispatched.descriptor.num_tokens)
        self._pending = self.step.token_rows(self.step.hidden_states(metadata)), num_tokens

    def pool(self) -> torch.Tensor:
        """Return the rows of the texts of the last `execute_model`, `[num_texts, size]` float32 on the CPU.

        With `of_tokens` they are those of its tokens, `[num_tokens, size]`.

        Takes the place of a generating runner's `sample_tokens`. Waits for the device.
        """
        assert self._pending is not None, "execute_model has not run"
        (rows, num_rows), self._pending = self._pending, None
        return rows[:num_rows].to("cpu", copy=True)

    def reset(self) -> None:
        """Drop a batch that was launched but not pooled because of an error. Idempotent."""
        device = self.step.buffers.input_ids.device
        if device.type == "cuda":
            with suppress(RuntimeError):  # a device that has failed; the next launch reports it
                torch.cuda.synchronize(device)
        clear_forward_context()
        self._pending = None

    def close(self) -> None:
        """Free the graphs. Idempotent; must precede freeing the model."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None


def capture_runner(
    step: PoolingStep,
    plan: GraphPlan,
    *,
    max_model_len: int,
    graph_kind: str,
    strict: bool,
    on_phase: OnPhase | None,
) -> PoolingRunner:
    """Capture the planned graphs, of pieces and pooling with attention between them, and return the runner."""
    graphs = None
    if plan.piecewise:
        graphs = capture(
            step.compiled,
            plan.piecewise,
            lambda descriptor: step.model_inputs(descriptor.num_tokens),
            mode=CUDAGraphMode.PIECEWISE,
            context=lambda descriptor, phase: step.context(step.dummy_batch(descriptor, max_model_len)),
            after=step.pool,
            kind=graph_kind,
            strict=strict,
            watched=step.buffers.tensors(),
            on_phase=on_phase,
        )
    dispatcher = Dispatcher(
        full=(),
        piecewise=() if graphs is None else graphs.descriptors,
        resolved=plan.resolved,
        failed={}
        if graphs is None
        else {(CUDAGraphMode.PIECEWISE, one.descriptor): one.reason for one in graphs.failed},
        static_sizes=step.compiled.report().static_sizes,
    )
    return PoolingRunner(step=step, plan=plan, graphs=graphs, dispatcher=dispatcher, strict=strict)
