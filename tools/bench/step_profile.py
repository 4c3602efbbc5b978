"""Measure where a decode step's time goes: the host's parts, and how much of the time the GPU is idle."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.llm import LLM
from piecegraph.runner.output.async_output import AsyncOutput
from piecegraph.runner.scheduling.scheduler_output import ScheduledDecodes, ScheduledRequest, SchedulerOutput
from piecegraph.tools.bench.latency import model_size
from piecegraph.tools.bench.measure.ceilings import Ceilings
from piecegraph.tools.bench.measure.floor import floor_seconds
from piecegraph.tools.bench.measure.offline_workload import Workload
from piecegraph.tools.bench.throughput import generate

WINDOW_STEPS = 50
MARGIN_STEPS = 5  # on each side of the window, which the profiler's start and end disturb
PROFILED_STEPS = WINDOW_STEPS + 2 * MARGIN_STEPS

LAUNCH_GAP_S = 5e-6
"""A bound of the pause between two kernels of one graph; in a longer pause the device waited for the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The milliseconds of several steps."""

    mean: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The seconds of the host in one step of the engine, and the step's batch."""

    batch_size: int
    is_decode: bool  # one token a request
    context: float  # tokens a request had before it, on average
    parts: Mapping[str, float]  # by the names of `PARTS`


PARTS = {
    "schedule": "Scheduler.schedule",
    "execute_model": "ModelRunner.execute_model: states, inputs, launches; on a CPU the model itself",
    "sample_tokens": "ModelRunner.sample_tokens",
    "output_wait": "AsyncOutput.get: waits for the device; on a GPU for the step before",
    "processing": "the rest of Engine.step: tokens to requests, ends, outputs",
    "between_steps": "LLM.generate's own, before the step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuIdle:
    """The share of a window of steady decode steps in which the GPU ran no kernel; copies do not count as running."""

    steps: int
    window_ms: float
    idle_share: float  # every pause counted, those between a graph's kernels too
    idle_share_between_launches: float  # pauses longer than LAUNCH_GAP_S only


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """The parts of a decode step's time at the largest batch that only decodes, at one temperature."""

    temperature: float
    batch_size: int
    steps: int
    step_ms: Spread  # from a step's begin to the next one's
    host_ms: Spread  # of that, all but the wait for the device
    parts_ms: dict[str, Spread]
    floor_ms: float
    gpu: GpuIdle | None  # None on a CPU, and where fewer than PROFILED_STEPS such steps follow one another


def profile_steps(
    llm: LLM, workload: Workload, temperatures: Sequence[float], *, ceilings: Ceilings
) -> list[StepProfile]:
    """Run the workload again at each temperature, with a clock around the engine's parts.

    On a GPU the workload runs once more under torch's profiler, which slows the host and so gives no host times. Call
    this after `warm_up` or `measure_throughput`. A temperature at which no step only decodes has no profile.
    """
    profiles = []
    for temperature in temperatures:
        with StepClock(llm) as clock:
            generate(llm, workload, temperature)
        steady = steady_steps(clock.steps)
        if not steady:
            continue
        batch_size, context = steady[0].batch_size, statistics.fmean(step.context for step in steady)
        parts = {name: spread([step.parts[name] for step in steady]) for name in PARTS}
        profiles.append(
            StepProfile(
                temperature=temperature,
                batch_size=batch_size,
                steps=len(steady),
                step_ms=spread([sum(step.parts.values()) for step in steady]),
                host_ms=spread([sum(step.parts.values()) - step.parts["output_wait"] for step in steady]),
                parts_ms=parts,
                floor_ms=1e3 * floor_seconds(model_size(llm), ceilings, batch_size, context),
                gpu=_gpu_idle(llm, workload, temperature, batch_size),
            )
        )
    return profiles


def steady_steps(steps: Sequence[StepTimes]) -> list[StepTimes]:
    """Return the steps that only decode, at the largest batch that does."""
    decodes = [step for step in steps if step.is_decode]
    largest = max((step.batch_size for step in decodes), default=0)
    return [step for step in decodes if step.batch_size == largest]


def _mean_context(scheduled: Sequence[ScheduledRequest]) -> float:
    if isinstance(scheduled, ScheduledDecodes):  # in columns: next to no time, and none of the host's caches
        return float(scheduled.num_computed.mean())
    return statistics.fmean(item.num_computed_tokens for item in scheduled)


def spread(seconds: Sequence[float]) -> Spread:
    p90 = statistics.quantiles(seconds, n=10, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    return Spread(mean=1e3 * statistics.fmean(seconds), p90=1e3 * p90)


class StepClock:
    """A context manager that runs a clock around the parts of an engine's step; what runs stays the same.

    `on_step` is called with each step when it ends; the time of that call belongs to no step.
    """

    def __init__(self, llm: LLM, on_step: Callable[[StepTimes], None] = lambda step: None) -> None:
        self.steps: list[StepTimes] = []
        self._engine, self._on_step = llm.engine, on_step
        self._timed: list[tuple[object, str, Callable[..., Any]]] = [
            (llm.engine, "step", self._step),
            (llm.engine.scheduler, "schedule", self._schedule),
            (llm.runner, "execute_model", self._execute_model),
            (llm.runner, "sample_tokens", self._sample_tokens),
        ]
        self._run = {name: getattr(owner, name) for owner, name, _ in self._timed}
        self._spent: dict[str, float] = {}
        self._output: SchedulerOutput | None = None
        self._ended: float | None = None

    def __enter__(self) -> StepClock:
        for owner, name, timed in self._timed:
            setattr(owner, name, timed)  # in front of the method of its class
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for owner, name, _ in self._timed:
            delattr(owner, name)

    def _step(self, *args: Any) -> list[RequestOutput]:
        started = time.perf_counter()
        self._spent = dict.fromkeys(PARTS, 0.0)
        outputs: list[RequestOutput] = self._run["step"](*args)
        seconds = time.perf_counter() - started
        if self._output is not None and not self._output.is_empty:
            spent = self._spent
            spent["processing"] = seconds - sum(spent.values())
            spent["between_steps"] = 0.0 if self._ended is None else started - self._ended
            scheduled = self._output.scheduled
            step = StepTimes(
                batch_size=len(scheduled),
                is_decode=self._output.num_tokens == len(scheduled),
                context=_mean_context(scheduled),
                parts=spent,
            )
            self.steps.append(step)
            self._on_step(step)
        self._ended = time.perf_counter()
        return outputs

    def _schedule(self) -> SchedulerOutput:
        output: SchedulerOutput = self._clocked("schedule", self._run["schedule"])
        self._output = output
        return output

    def _execute_model(self, *args: Any, **kwargs: Any) -> None:
        self._clocked("execute_model", self._run["execute_model"], *args, **kwargs)

    def _sample_tokens(self, *args: Any, **kwargs: Any) -> AsyncOutput:
        output: AsyncOutput = self._clocked("sample_tokens", self._run["sample_tokens"], *args, **kwargs)
        name, get = "get", output.get
        setattr(output, name, lambda: self._clocked("output_wait", get))
        return output

    def _clocked(self, part: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return run(*args, **kwargs)
        finally:
            self._spent[part] += time.perf_counter() - started


def _gpu_idle(llm: LLM, workload: Workload, temperature: float, batch_size: int) -> GpuIdle | None:
    device = llm.runner.step.buffers.input_ids.device
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.cuda.synchronize(device)  # the first profile of a process takes seconds to start
    window = _ProfiledWindow(batch_size, device)
    try:
        with StepClock(llm, window.take):
            generate(llm, workload, temperature)
    finally:
        window.stop()
    return window.result()


class _ProfiledWindow:
    """A profile of the first consecutive steps that only decode at `batch_size`, taken once."""

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self._batch_size, self._device = batch_size, device
        self._profile: profile | None = None  # from the first such step on
        self._is_running = False
        self._num_steps = 0  # launched in it

    def take(self, step: StepTimes) -> None:
        """Record that a step has been launched."""
        is_steady = step.is_decode and step.batch_size == self._batch_size
        if self._profile is None and is_steady:
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
            self._is_running = True
        elif self._is_running:
            self._num_steps += is_steady
            if not is_steady or self._num_steps == PROFILED_STEPS:
                self.stop()

    def stop(self) -> None:
        """Stop the profiler. Idempotent."""
        if self._profile is not None and self._is_running:
            torch.cuda.synchronize(self._device)
            self._profile.stop()
            self._is_running = False

    def result(self) -> GpuIdle | None:
        """Return the profile; None if too few steps followed one another."""
        if self._profile is None or self._num_steps < PROFILED_STEPS:
            return None
        kernels = [
            (event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in self._profile.events() or []
            if str(event.device_type).endswith("CUDA") and not event.name.startswith(("Memcpy", "Memset"))
        ]
        return gpu_idle(kernels)


def gpu_idle(kernels: Sequence[tuple[float, float]]) -> GpuIdle:
    """Return the GPU's idle time over the kernels of `PROFILED_STEPS` steps, (start, end) in seconds, without the
    margins.
    """
    first, last = min(start for start, _ in kernels), max(end for _, end in kernels)
    margin = (last - first) * MARGIN_STEPS / PROFILED_STEPS
    window_s = last - first - 2 * margin
    idle = pauses(kernels, first + margin, last - margin)
    return GpuIdle(
        steps=WINDOW_STEPS,
        window_ms=1e3 * window_s,
        idle_share=sum(idle) / window_s,
        idle_share_between_launches=sum(pause for pause in idle if pause > LAUNCH_GAP_S) / window_s,
    )


def pauses(busy: Iterable[tuple[float, float]], begin: float, end: float) -> list[float]:
    """Return the lengths of the intervals from `begin` to `end` that no interval of `busy` covers.

    The intervals of `busy` are (start, end) in any order; they may overlap and reach beyond `begin` and `end`.
    """
    found = []
    covered = begin
    for start, stop in sorted(busy):
        if min(start, end) > covered:
            found.append(min(start, end) - covered)
        covered = max(covered, stop)
    if end > covered:
        found.append(end - covered)
    return found
