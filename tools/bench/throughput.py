"""Tokens a second of an offline workload, next to the least it could take, and where a step's time goes.

The workload is that of nano-vllm's bench.py: random token ids, lengths of prompts and outputs uniform in a
range, nothing ends early. The same seed gives the same prompts and lengths as there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from piecegraph.errors import ConfigError
from piecegraph.runner.async_output import AsyncOutput
from piecegraph.runner.llm import LLM
from piecegraph.runner.outputs import RequestOutput
from piecegraph.runner.sampling_params import SamplingParams
from piecegraph.runner.scheduling.scheduler_output import SchedulerOutput
from piecegraph.tools.bench.ceilings import Ceilings
from piecegraph.tools.bench.floor import ModelSize, cache_bytes, floor_seconds
from piecegraph.tools.bench.latency import model_size

LARGEST_TOKEN_ID = 10_000  # of a prompt, if the vocabulary has it; nano-vllm's

WARM_UP_LENGTHS = 32
WARM_UP = (
    f"the same prompts at each temperature, request i answered with 1 + i % {WARM_UP_LENGTHS} tokens, so that the "
    "batch fills and shrinks; the prefix cache is emptied before every run"
)


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that all arrive at once."""

    prompts: tuple[list[int], ...]  # token ids
    output_lens: tuple[int, ...]
    shared_prefix: int  # tokens with which every prompt begins

    @property
    def lengths(self) -> tuple[Lengths, ...]:
        return tuple(
            Lengths(len(prompt), output) for prompt, output in zip(self.prompts, self.output_lens, strict=True)
        )


def make_workload(
    num_requests: int,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    *,
    shared_prefix: int = 0,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Random prompts and output lengths; ranges include both ends. `shared_prefix` comes on top of a prompt's."""
    random = Random(seed)
    largest = min(LARGEST_TOKEN_ID, vocab_size - 1)
    prompts = [[random.randint(0, largest) for _ in range(random.randint(*prompt_tokens))] for _ in range(num_requests)]
    output_lens = tuple(random.randint(*output_tokens) for _ in range(num_requests))
    prefix = [random.randint(0, largest) for _ in range(shared_prefix)]  # last: without one the rest stays the same
    return Workload(
        prompts=tuple([*prefix, *prompt] for prompt in prompts), output_lens=output_lens, shared_prefix=shared_prefix
    )


def workload_floor_seconds(
    size: ModelSize,
    ceilings: Ceilings,
    requests: Sequence[Lengths],
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    shared_prefix: int = 0,
) -> float:
    """Less than any schedule of `requests` can take: weights, and then the cache.

    Weights are read once in each of the fewest possible steps, or multiplied by every token (the logits' by drawn
    ones only), whichever takes longer in all. Each step that decodes reads the keys and values of all the tokens
    before it. `shared_prefix` tokens are computed once. A prompt's attention to itself counts as nothing.
    """
    drawn = sum(request.output for request in requests)
    # The last token of an output is drawn and not computed.
    computed = sum(request.prompt + request.output - 1 for request in requests) - shared_prefix * (len(requests) - 1)
    steps = max(
        max(request.output for request in requests), -(-drawn // max_num_seqs), -(-computed // max_num_batched_tokens)
    )
    multiplied = (size.matmul_params - size.logits_params) * computed + size.logits_params * drawn
    weights = max(steps * size.weight_bytes / ceilings.read_bytes_per_s, 2 * multiplied / ceilings.flops_per_s)
    tokens_read = {  # by window, since layers differ in little else
        window: sum(
            min(context, window or context)
            for request in requests
            for context in range(request.prompt, request.prompt + request.output - 1)
        )
        for window in {layer.window for layer in size.layers}
    }
    cached = sum(tokens_read[layer.window] * cache_bytes([layer], batch_size=1, context=1) for layer in size.layers)
    return weights + cached / ceilings.read_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRun:
    """The whole workload, once."""

    seconds: float  # of `LLM.generate`, from the first request queued to the last token on the host
    steps: int
    steps_by_mode: dict[str, int]
    computed_tokens: int  # without padding; prompts less what was cached, and outputs
    prefix_hit_rate: float  # tokens found in the prefix cache, of those looked for
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRow:
    """The runs at one temperature; figures are of the median one by time."""

    temperature: float
    prompt_tokens: int
    output_tokens: int
    floor_s: float
    runs: tuple[ThroughputRun, ...]

    @property
    def median(self) -> ThroughputRun:
        return sorted(self.runs, key=lambda run: run.seconds)[(len(self.runs) - 1) // 2]

    def as_record(self) -> dict[str, object]:
        """Everything by name, what is derived included."""
        run, seconds = self.median, [run.seconds for run in self.runs]
        return {
            "temperature": self.temperature,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "seconds": run.seconds,
            "seconds_min": min(seconds),
            "seconds_max": max(seconds),
            "output_tokens_per_s": self.output_tokens / run.seconds,
            "total_tokens_per_s": (self.prompt_tokens + self.output_tokens) / run.seconds,
            "steps": run.steps,
            "steps_by_mode": run.steps_by_mode,
            "mean_batch": self.output_tokens / run.steps,  # requests that draw a token in a step
            "computed_tokens": run.computed_tokens,
            "prefix_hit_rate": run.prefix_hit_rate,
            "preemptions": run.preemptions,
            "floor_s": self.floor_s,
            "share_of_floor": self.floor_s / run.seconds,
            "runs": self.runs,
        }


def measure_throughput(
    llm: LLM,
    workload: Workload,
    temperatures: Sequence[float],
    *,
    ceilings: Ceilings,
    repeat: int = 1,
    on_row: Callable[[ThroughputRow], None] = lambda row: None,
) -> list[ThroughputRow]:
    """Run the workload `repeat` times at each temperature, after `warm_up`. Nothing else may run in `llm`.

    Raises `ConfigError` if a request does not fit `max_model_len`.
    """
    warm_up(llm, workload, temperatures)
    floor_s = workload_floor_seconds(
        model_size(llm),
        ceilings,
        workload.lengths,
        max_num_seqs=llm.runner.step.buffers.max_num_reqs,
        max_num_batched_tokens=llm.runner.step.buffers.max_num_tokens,
        shared_prefix=workload.shared_prefix,
    )
    rows = []
    for temperature in temperatures:
        rows.append(
            ThroughputRow(
                temperature=temperature,
                prompt_tokens=sum(map(len, workload.prompts)),
                output_tokens=sum(workload.output_lens),
                floor_s=floor_s,
                runs=tuple(_run(llm, workload, temperature) for _ in range(repeat)),
            )
        )
        on_row(rows[-1])
    return rows


def warm_up(llm: LLM, workload: Workload, temperatures: Sequence[float]) -> None:
    """See `WARM_UP`. Raises `ConfigError` if a request does not fit `max_model_len`."""
    longest = max(map(sum, workload.lengths))
    if longest > llm.max_model_len:
        raise ConfigError(
            f"a request of {longest} tokens, prompt and output, does not fit max_model_len={llm.max_model_len}; raise "
            "it, or ask for fewer tokens."
        )
    shortened = [min(output, 1 + i % WARM_UP_LENGTHS) for i, output in enumerate(workload.output_lens)]
    for temperature in temperatures:
        _generate(llm, workload, temperature, shortened)


def _generate(llm: LLM, workload: Workload, temperature: float, output_lens: Sequence[int] | None = None) -> float:
    """Seconds of the workload, with no prefix cached before it."""
    output_lens = workload.output_lens if output_lens is None else output_lens
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    params = [
        SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True, detokenize=False)
        for output_len in output_lens
    ]
    llm.engine.scheduler.reset_prefix_cache()
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    made = [len(output.outputs[0].token_ids) for output in outputs]
    assert made == list(output_lens), "outputs that ended early: the figures would be of another workload"
    return seconds


def _run(llm: LLM, workload: Workload, temperature: float) -> ThroughputRun:
    counters, modes_before, stats_before = llm.runner.counters, llm.runner.counters.by_mode(), llm.engine.stats
    tokens_before = sum(row.real_tokens for row in counters.rows())
    seconds = _generate(llm, workload, temperature)
    modes = {mode.value: count - modes_before.get(mode, 0) for mode, count in counters.by_mode().items()}
    stats = llm.engine.stats
    queries = stats.num_prefix_queries - stats_before.num_prefix_queries
    return ThroughputRun(
        seconds=seconds,
        steps=sum(modes.values()),
        steps_by_mode={mode: count for mode, count in modes.items() if count},
        computed_tokens=sum(row.real_tokens for row in counters.rows()) - tokens_before,
        prefix_hit_rate=(stats.num_prefix_hits - stats_before.num_prefix_hits) / queries,
        preemptions=stats.num_preemptions - stats_before.num_preemptions,
    )


WINDOW_STEPS = 50
MARGIN_STEPS = 5  # on each side of the window, which the profiler's start and end disturb
PROFILED_STEPS = WINDOW_STEPS + 2 * MARGIN_STEPS

LAUNCH_GAP_S = 5e-6
"""Between two kernels of one graph the device pauses for less; a longer pause waited for the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Milliseconds of several steps."""

    mean: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of the host in one step of the engine, and what the step was."""

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
    """How much of a window of steady decode steps the GPU ran no kernel; copies do not count as running."""

    steps: int
    window_ms: float
    idle_share: float  # every pause counted, those between a graph's kernels too
    idle_share_between_launches: float  # pauses longer than LAUNCH_GAP_S only


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Where the time of a decode step goes at the largest batch that only decodes, at one temperature."""

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
    """Run the workload again at each temperature, with a clock around the engine's parts; on a GPU once more under
    torch's profiler, which is not free and so gives no times of the host.

    After `warm_up`, or `measure_throughput`. A temperature at which no step only decodes has no profile.
    """
    profiles = []
    for temperature in temperatures:
        with StepClock(llm) as clock:
            _generate(llm, workload, temperature)
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
    """Those that only decode, at the largest batch that does."""
    decodes = [step for step in steps if step.is_decode]
    largest = max((step.batch_size for step in decodes), default=0)
    return [step for step in decodes if step.batch_size == largest]


def spread(seconds: Sequence[float]) -> Spread:
    p90 = statistics.quantiles(seconds, n=10, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    return Spread(mean=1e3 * statistics.fmean(seconds), p90=1e3 * p90)


class StepClock:
    """While entered, a clock runs around the parts of an engine's step; what runs stays the same.

    `on_step` is told of each step when it ends; its own time is no step's.
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

    def _step(self) -> list[RequestOutput]:
        started = time.perf_counter()
        self._spent = dict.fromkeys(PARTS, 0.0)
        outputs: list[RequestOutput] = self._run["step"]()
        seconds = time.perf_counter() - started
        if self._output is not None and not self._output.is_empty:
            spent = self._spent
            spent["processing"] = seconds - sum(spent.values())
            spent["between_steps"] = 0.0 if self._ended is None else started - self._ended
            scheduled = self._output.scheduled
            step = StepTimes(
                batch_size=len(scheduled),
                is_decode=self._output.num_tokens == len(scheduled),
                context=statistics.fmean(item.num_computed_tokens for item in scheduled),
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
            _generate(llm, workload, temperature)
    finally:
        window.stop()
    return window.result()


class _ProfiledWindow:
    """Profiles the first steps in a row that only decode at `batch_size`, once."""

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self._batch_size, self._device = batch_size, device
        self._profile: profile | None = None  # from the first such step on
        self._is_running = False
        self._num_steps = 0  # launched in it

    def take(self, step: StepTimes) -> None:
        """A step has been launched."""
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
        """Harmless to repeat."""
        if self._profile is not None and self._is_running:
            torch.cuda.synchronize(self._device)
            self._profile.stop()
            self._is_running = False

    def result(self) -> GpuIdle | None:
        """None if too few steps followed one another."""
        if self._profile is None or self._num_steps < PROFILED_STEPS:
            return None
        kernels = [
            (event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in self._profile.events() or []
            if str(event.device_type).endswith("CUDA") and not event.name.startswith(("Memcpy", "Memset"))
        ]
        return gpu_idle(kernels)


def gpu_idle(kernels: Sequence[tuple[float, float]]) -> GpuIdle:
    """Of `PROFILED_STEPS` steps' kernels, (start, end) in seconds, without the margins."""
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
    """Lengths of the stretches of `begin` to `end` outside the union of `busy`: (start, end) each, in any order,
    overlapping or reaching beyond."""
    found = []
    covered = begin
    for start, stop in sorted(busy):
        if min(start, end) > covered:
            found.append(min(start, end) - covered)
        covered = max(covered, stop)
    if end > covered:
        found.append(end - covered)
    return found
