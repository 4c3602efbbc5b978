"""`FastStart`, what remains of a start while the engine serves: pieces that compile, graphs that are not captured."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from piecegraph.compiler.building.background import BackgroundCompile, describe
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import CompileError, PiecegraphError
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.cudagraphs.dispatcher import Dispatcher
from piecegraph.runner.cudagraphs.graph_plan import GraphPlan
from piecegraph.runner.cudagraphs.late_dispatcher import Bucket, LateDispatcher
from piecegraph.runner.cudagraphs.measured_times import why_not_measured
from piecegraph.runner.engine.metrics import Counter as CounterMetric
from piecegraph.runner.engine.metrics import Gauge, Metric
from piecegraph.runner.engine.model_runner import ModelRunner

logger = logging.getLogger(__name__)

FULL_SPEED = "full speed"


@dataclass(frozen=True, slots=True)
class StartProgress:
    """How far a start is."""

    phase: str  # "compiling", "capturing" or "full speed"
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        return self.phase if self.phase == FULL_SPEED else f"{self.phase} {self.done} of {self.total}"


def why_not_fast(config: EngineConfig) -> str:
    """Return why a start with this config must finish before it serves, or ""."""
    for is_so, what in (
        (config.tensor_parallel_size > 1, "with several ranks, which must run the same pieces in each step"),
        (config.pipeline_parallel_size > 1, "with several stages, each of which has pieces of its own"),
        (config.data_parallel_size > 1, "with several engines, which are in processes of their own"),
        (config.speculative is not None, "with speculative_config, whose draft is measured against the model"),
        (config.enable_lora, "with enable_lora, whose adapters are parts of the step that graphs hold"),
        (config.compile.selfcheck, "with selfcheck, which compares compiled pieces"),
        (bool(config.compile.expect), "with expect, which needs the matches of passes inside the compiler"),
    ):
        if is_so:
            return f"start='fast' is not available {what}; the start was full"
    return ""


class FastStart:
    """The rest of a start, done by the thread that steps the engine: between two steps, and in idle moments.

    Compiled pieces replace their graphs as they arrive. Then CUDA graphs are captured, one between two steps, beginning
    with the graph that most batches have run without. Graphs that no batch has missed are left to idle moments.
    """

    def __init__(
        self,
        background: BackgroundCompile,
        compiled: CompiledModel,
        runner: ModelRunner,
        plan: GraphPlan,
        max_graph_bytes: int | None,
        config: EngineConfig,
    ) -> None:
        """Have `runner`, whose graph manager has captured nothing, run without graphs until they are captured.

        `max_graph_bytes`: the memory set aside for graphs. With `config.strict` a failure is raised instead of noted,
        and with `config.measure_graphs` each graph is measured after its capture.
        """
        self._background = background
        self._compiled = compiled
        self._runner = runner
        self._plan = plan
        self._max_graph_bytes = max_graph_bytes
        self._strict = config.strict
        self._measures = config.measure_graphs and not why_not_measured(config)
        full, piecewise = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
        self._to_capture: list[Bucket] = [(piecewise, one) for one in reversed(plan.piecewise)]
        self._to_capture += [(full, one) for one in reversed(plan.full)]
        self._num_captures = len(self._to_capture)
        self._waiting: Counter[Bucket] = Counter()  # batches that ran without the graph that they will run under
        self._failures: list[str] = []
        self._is_compiled = False
        self._is_over = False
        runner.graphs.begin()
        self._dispatch_over_captured()

    @property
    def progress(self) -> StartProgress:
        """How far the start is. Any thread may ask."""
        if self._is_over:
            return StartProgress(FULL_SPEED)
        if not self._is_compiled:
            return StartProgress("compiling", self._background.num_swapped, self._background.num_pieces)
        return StartProgress("capturing", self._num_captures - len(self._to_capture), self._num_captures)

    @property
    def notes(self) -> tuple[str, ...]:
        """What failed while the engine served, a sentence for each."""
        return tuple(self._failures)

    def metrics(self, model: str) -> list[Metric]:
        """Return the number of failures, and whether the start is over, as 1 or 0."""
        labels = {"model_name": model, "engine": "0"}
        return [
            CounterMetric("piecegraph:start_failures", dict(labels), len(self._failures)),
            Gauge("piecegraph:is_at_full_speed", dict(labels), float(self._is_over)),
        ]

    def between_steps(self) -> bool:
        """Do what is due between two steps; return True once the start is over.

        If strict, raises `CompileError` for a failed compile and `CaptureError` for a failed capture, in each call.
        """
        self._advance(is_idle=False)
        return self._is_over

    def use_idle_moment(self) -> float | None:
        """Do a part of the rest; return the seconds after which there may be more to do, or None if the start is over.

        Raises what `between_steps` raises.
        """
        has_advanced = self._advance(is_idle=True)
        return None if self._is_over else 0.0 if has_advanced else 0.1

    def finish(self) -> None:
        """Wait for the compile and capture everything, for a caller that runs no step meanwhile. Idempotent.

        Raises what `between_steps` raises.
        """
        while not self._is_over:
            if not self._is_compiled:
                self._background.wait()
            self._advance(is_idle=True)

    def close(self) -> None:
        """End the compile and its processes. Idempotent."""
        self._background.close()

    def _advance(self, *, is_idle: bool) -> bool:
        """Swap or capture; return whether anything was done."""
        if self._is_over:
            return False
        if not self._is_compiled:
            return self._swap()
        bucket = self._next_capture(is_idle=is_idle)
        if bucket is not None:
            self._capture(bucket)
        if not self._to_capture:
            self._end()
        return bucket is not None or self._is_over

    def _swap(self) -> bool:
        background = self._background
        has_news = background.is_waited_for
        if has_news:
            background.swap()
        if self._strict and background.failure is not None:
            failure = background.failure
            if isinstance(failure, PiecegraphError):
                raise failure
            raise CompileError(f"strict=True, and the compile in the background failed: {failure}") from failure
        if background.is_finished:
            self._is_compiled = True
            if background.failure is not None:
                self._failures.append(f"start: pieces run as their graphs: {describe(background.failure)}")
            for index, reason in self._compiled.report().eager_pieces.items():
                self._failures.append(f"start: unique piece {index} runs eagerly: {reason}")
            if not self._to_capture:
                self._end()
            return True
        return has_news

    def _next_capture(self, *, is_idle: bool) -> Bucket | None:
        """Return the graph that most batches wait for; in an idle moment, else the largest that is left."""
        wanted = [(self._waiting[bucket], -number, bucket) for number, bucket in enumerate(self._to_capture)]
        best = max(wanted, key=lambda each: each[:2], default=None)
        return None if best is None or not (best[0] or is_idle) else best[2]

    def _capture(self, bucket: Bucket) -> None:
        mode, descriptor = bucket
        graphs = self._runner.graphs
        graphs.capture_more(mode, (descriptor,), max_bytes=self._max_graph_bytes)
        if self._measures:
            graphs.measure(mode, (descriptor,))
        reason = graphs.failed().get(bucket)
        if reason is not None:
            self._failures.append(f"start: {mode.value} for {descriptor.num_tokens} tokens was not captured: {reason}")
        self._to_capture.remove(bucket)
        self._waiting.pop(bucket, None)
        self._dispatch_over_captured()

    def _dispatch_over_captured(self) -> None:
        graphs, failed = self._runner.graphs, self._runner.graphs.failed()
        planned = Dispatcher(
            full=[one for one in self._plan.full if (CUDAGraphMode.FULL, one) not in failed],
            piecewise=[one for one in self._plan.piecewise if (CUDAGraphMode.PIECEWISE, one) not in failed],
            resolved=self._plan.resolved,
        )
        late = LateDispatcher(
            full=graphs.descriptors(CUDAGraphMode.FULL),
            piecewise=graphs.descriptors(CUDAGraphMode.PIECEWISE),
            resolved=self._plan.resolved,
            failed=failed,
            planned=planned,
            waiting=self._waiting,
        )
        self._runner.use_dispatcher(late, strict=False)

    def _end(self) -> None:
        """Serve on as after a full start."""
        graphs = self._runner.graphs
        graphs.finish()
        dispatcher = graphs.dispatcher(self._plan.resolved, self._compiled.report().static_sizes)
        self._runner.use_dispatcher(dispatcher, strict=self._strict)
        self._is_over = True
        logger.info("the start is over: every piece that could be compiled is, and %d graphs", self._num_captures)
