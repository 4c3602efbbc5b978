"""Milliseconds of a decode step, by batch size and mode, next to the least it could take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError
from piecegraph.runner.attention.layer import attention_layers
from piecegraph.runner.batch import Batch, build_batch
from piecegraph.runner.llm import LLM
from piecegraph.runner.model_runner import ModelRunner
from piecegraph.runner.sampling_params import SamplingParams
from piecegraph.runner.scheduler import SchedulerOutput
from piecegraph.tools.bench.ceilings import Ceilings
from piecegraph.tools.bench.floor import ModelSize, floor_seconds

WARMUP_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyRow:
    """One batch size under one mode."""

    batch_size: int
    mode: str  # what ran, which is not what was asked for if that was downgraded
    asked: str
    padded_tokens: int
    ms: float  # mean over all steps, back to back
    ms_p10: float
    ms_p90: float
    launches: int | None  # by the host in one step; None where they cannot be counted
    kernels: int | None  # run by the device in one step
    floor_ms: float
    reason: str | None  # for a downgrade

    @property
    def share_of_roofline(self) -> float:
        return self.floor_ms / self.ms


def model_size(llm: LLM) -> ModelSize:
    """What a step reads: every parameter but an embedding that nothing multiplies by."""
    layers = attention_layers(llm.compiled.split_calls)
    tensors = {t.data_ptr(): (name, t) for name, t in llm.compiled.bound_tensors() if t.is_floating_point()}
    params = size_bytes = 0
    is_tied = not any("lm_head" in name for name, _ in tensors.values())
    for name, tensor in tensors.values():
        if tensor.dim() < 2 or ("embed" in name and not is_tied):
            continue
        params += tensor.numel()
        size_bytes += tensor.numel() * tensor.element_size()
    return ModelSize(matmul_params=params, weight_bytes=size_bytes, layers=layers)


def measure_latency(
    llm: LLM,
    batch_sizes: Sequence[int],
    modes: Sequence[CUDAGraphMode],
    *,
    context: int,
    steps: int,
    ceilings: Ceilings,
    on_row: Callable[[LatencyRow], None] = lambda row: None,
) -> list[LatencyRow]:
    """Decode `steps` tokens greedily for each batch size under each mode, from `context` tokens on.

    A step is input preparation, model, logits and the choice of the likeliest token; nothing is
    copied to the host in between. Raises `ConfigError` if the requests do not fit.
    """
    size = model_size(llm)
    rows: list[LatencyRow] = []
    for batch_size in batch_sizes:
        with _Decoding(llm, batch_size, context, steps) as decoding:
            for mode in modes:
                row = decoding.time(mode, steps, floor_seconds(size, ceilings, batch_size, context + steps / 2))
                rows.append(row)
                on_row(row)
    return rows


class _Decoding:
    """`batch_size` requests whose prompts are computed; steps are then driven without the scheduler."""

    def __init__(self, llm: LLM, batch_size: int, context: int, steps: int) -> None:
        self._llm, self._batch_size, self._context = llm, batch_size, context
        self._runner: ModelRunner = llm.runner
        self._ids = [f"latency-{batch_size}-{i}" for i in range(batch_size)]
        room = context + steps + WARMUP_STEPS + 2
        if room > llm.max_model_len:
            raise ConfigError(f"{room} tokens a request do not fit max_model_len={llm.max_model_len}; raise it.")
        generator = torch.Generator().manual_seed(0)
        params = SamplingParams(temperature=0.0, max_tokens=room - context, ignore_eos=True, detokenize=False)
        for request_id in self._ids:
            prompt = torch.randint(llm.engine.vocab_size, (context,), generator=generator).tolist()
            llm.engine.add_request(request_id, prompt, params)

    def __enter__(self) -> _Decoding:
        engine = self._llm.engine
        while any(self._computed(request_id) < self._context for request_id in self._ids):
            engine.step()
        self._step: SchedulerOutput = engine.scheduler.schedule()
        if len(self._step.scheduled) != self._batch_size:
            raise ConfigError(
                f"only {len(self._step.scheduled)} of {self._batch_size} requests run at once; raise max_num_seqs, or "
                "give the cache more memory."
            )
        self._batch: Batch = build_batch(self._step.scheduled)
        self._runner.execute_model(self._step)
        self._runner.sample_tokens()
        rows = [self._runner.step.states.row(request_id) for request_id in self._batch.request_ids]
        self._rows = torch.tensor(rows, device=self._device)
        return self

    def _computed(self, request_id: str) -> int:
        request = self._llm.engine.requests.get(request_id)
        if request is None:
            raise ConfigError(
                f"{self._batch_size} requests of {self._context} tokens do not run at once: some ended before others "
                "began. Raise max_num_seqs, or give the cache more memory."
            )
        return request.num_computed_tokens

    def __exit__(self, *exc_info: object) -> None:
        for request_id in self._ids:
            self._llm.engine.abort(request_id)

    @property
    def _device(self) -> torch.device:
        return self._runner.step.buffers.input_ids.device

    def time(self, mode: CUDAGraphMode, steps: int, floor_s: float) -> LatencyRow:
        with torch.no_grad():
            states = self._runner.step.states
            states.num_computed_tokens[self._rows] = self._context
            for item in self._step.scheduled:
                item.request.num_computed_tokens = self._context  # for backends that plan on the host
            dispatched = self._runner.dispatch(self._batch, mode)

            def run() -> None:
                self._runner.run(self._batch, dispatched, self._step.scheduled)

            for _ in range(WARMUP_STEPS):
                run()
            launches, kernels = count_launches(run, self._device)
            states.num_computed_tokens[self._rows] = self._context
            each = time_steps(run, steps, self._device)
        deciles = statistics.quantiles(each, n=10) if len(each) > 1 else [each[0]] * 9
        return LatencyRow(
            batch_size=self._batch_size,
            mode=dispatched.mode.value,
            asked=mode.value,
            padded_tokens=dispatched.descriptor.num_tokens,
            ms=1e3 * statistics.fmean(each),
            ms_p10=1e3 * deciles[0],
            ms_p90=1e3 * deciles[-1],
            launches=launches,
            kernels=kernels,
            floor_ms=1e3 * floor_s,
            reason=None if dispatched.mode is mode else dispatched.reason,
        )


def time_steps(run: Callable[[], None], steps: int, device: torch.device) -> list[float]:
    """Seconds of each of `steps` runs, back to back: between CUDA events on a GPU, by the clock on a CPU."""
    if device.type != "cuda":
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
        return seconds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]


LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


def count_launches(run: Callable[[], None], device: torch.device) -> tuple[int | None, int | None]:
    """(what the host launched, kernels the device ran) in one run, by torch's profiler; None on a CPU."""
    if device.type != "cuda":
        return None, None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize(device)
    events = profiled.events() or []
    launches = sum(event.name.startswith(LAUNCHES) for event in events)
    kernels = sum(str(event.device_type).endswith("CUDA") for event in events)
    return (launches or None), (kernels or None)
