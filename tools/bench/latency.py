"""Measure milliseconds of a step, by batch size and mode, beside the floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.attention.interface.layer import attention_layers
from piecegraph.runner.distributed.worker import Worker
from piecegraph.runner.llm import LLM
from piecegraph.tools.bench.decode_batch import WARMUP_STEPS, DecodeBatch, Shares, share_of
from piecegraph.tools.bench.measure.ceilings import Ceilings
from piecegraph.tools.bench.measure.engines import Holder, from_engines
from piecegraph.tools.bench.measure.floor import ModelSize, RoutedExperts, floor_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyRow:
    """One batch size under one mode."""

    batch_size: int
    prefill_tokens: int  # of another request's prompt in each step, which makes it a mixed one
    mode: str  # what ran, which is not what was asked for if that was downgraded
    asked: str
    padded_tokens: int
    ms: float  # mean over all steps, back to back, with nothing between them
    ms_p10: float  # of as many steps with an event after each
    ms_p90: float
    launches: int | None  # by the host in one step; None where they cannot be counted
    kernels: int | None  # run by the device in one step
    floor_ms: float
    reason: str | None  # for a downgrade

    @property
    def share_of_roofline(self) -> float:
        return self.floor_ms / self.ms


def model_size(holder: Holder) -> ModelSize:
    """Return what a step reads: every parameter except an embedding that no matmul uses.

    Quantised weights count with the bytes that they are stored in; a byte of uint8 holds two parameters, a word of
    int32 eight. Keys and values count in the dtype of their cache.
    """
    caches = holder.runner.step.kv_caches
    layers = tuple(
        replace(layer, cache_dtype=caches[layer.name].key.dtype)
        for layer in attention_layers(holder.compiled.split_calls)
    )
    tensors = {t.data_ptr(): (name, t) for name, t in holder.compiled.bound_tensors() if _is_weight(name, t)}
    params = size_bytes = logits_params = expert_params = expert_bytes = num_experts = 0
    is_tied = not any("lm_head" in name for name, _ in tensors.values())
    for name, tensor in tensors.values():
        if tensor.dim() < 2 or ("embed" in name and not is_tied):
            continue
        num_params = _num_params(name, tensor)
        params += num_params
        size_bytes += tensor.nbytes
        if "lm_head" in name or ("embed" in name and is_tied):
            logits_params += num_params
        if tensor.dim() >= 3 and not name.endswith("weight_scale"):  # one matrix an expert; scales of linears have 3
            num_experts = tensor.shape[0]
            expert_params += num_params
            expert_bytes += tensor.nbytes
    top_k = getattr(holder.hf_config.get_text_config(decoder=True), "num_experts_per_tok", None)
    experts = None
    if num_experts and top_k:
        experts = RoutedExperts(params=expert_params, num_bytes=expert_bytes, num_experts=num_experts, top_k=top_k)
    return ModelSize(
        matmul_params=params, logits_params=logits_params, weight_bytes=size_bytes, layers=layers, experts=experts
    )


def _is_weight(name: str, tensor: torch.Tensor) -> bool:
    if tensor.dtype is torch.int32:
        return name.endswith("_packed")  # words of quantised weights; others are indices
    return tensor.is_floating_point() or tensor.dtype in (torch.int8, torch.uint8)


def _num_params(name: str, tensor: torch.Tensor) -> int:
    """Return the parameters that the values of a tensor are: none for the scales of quantised ones."""
    if name.endswith("_scale"):
        return 0
    return tensor.numel() * {torch.uint8: 2, torch.int32: 8}.get(tensor.dtype, 1)


def latency_notes(num_ranks: int, num_engines: int) -> list[str]:
    """Return what to know of figures where `num_ranks` ranks divide each layer, or `num_engines` engines a batch."""
    notes = []
    if num_ranks > 1:
        notes.append(
            f"times and kernels are rank 0's, and the floor is of what one of {num_ranks} ranks reads and computes: "
            "sums over the ranks are in the times and not in the floor"
        )
    if num_engines > 1:
        notes.append(
            f"a batch is spread over {num_engines} engines, which run their shares at the same time: times and kernels "
            "are those of the slowest engine, the padded size is its own, and the floor is of the largest share"
        )
    return notes


def measure_latency(
    llm: LLM,
    batch_sizes: Sequence[int],
    modes: Sequence[CUDAGraphMode],
    *,
    context: int,
    steps: int,
    ceilings: Ceilings,
    prefill_tokens: int = 0,
    on_row: Callable[[LatencyRow], None] = lambda row: None,
) -> list[LatencyRow]:
    """Time `steps` decode steps for each batch size under each mode, from `context` tokens on.

    With `prefill_tokens` each step is a mixed one: it also computes that many tokens of one more request's prompt, and
    the context stays. A step is input preparation, model, logits and the draw of a token; nothing is copied to the
    host in between. With `data_parallel_size` a batch is spread over the engines, which run at the same time. Raises
    `ConfigError` if the requests do not fit.
    """
    sizes = from_engines(llm, model_size)
    rows: list[LatencyRow] = []
    for batch_size in batch_sizes:
        with DecodeBatch(llm, batch_size, context, steps, prefill_tokens) as batch:
            for mode in modes:
                at_end = context if prefill_tokens else context + steps
                largest = -(-batch_size // len(sizes))
                floor_s = floor_seconds(sizes[0], ceilings, largest, (context + at_end) / 2, prefill_tokens)
                rows.append(_row(batch, mode, steps, prefill_tokens, floor_s))
                on_row(rows[-1])
    return rows


def _row(batch: DecodeBatch, mode: CUDAGraphMode, steps: int, prefill_tokens: int, floor_s: float) -> LatencyRow:
    """Time `steps` steps on all ranks, and return the times of rank 0, of the slowest engine if there are several."""
    timings = batch.on_ranks(_time_on_rank, mode, steps)
    timing = max([each for each in timings if each.rank == 0] or timings, key=lambda each: each.mean_s)
    each_s = timing.each_s
    deciles = statistics.quantiles(each_s, n=10) if len(each_s) > 1 else [each_s[0]] * 9
    return LatencyRow(
        batch_size=batch.batch_size,
        prefill_tokens=prefill_tokens,
        mode=timing.mode.value,
        asked=mode.value,
        padded_tokens=timing.padded_tokens,
        ms=1e3 * timing.mean_s,
        ms_p10=1e3 * deciles[0],
        ms_p90=1e3 * deciles[-1],
        launches=timing.launches,
        kernels=timing.kernels,
        floor_ms=1e3 * floor_s,
        reason=None if timing.mode is mode else timing.reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    """What one rank measured."""

    rank: int  # of its engine; under a launcher, each process has its own rank's figures only
    mode: CUDAGraphMode
    padded_tokens: int
    reason: str | None
    mean_s: float
    each_s: list[float]
    launches: int | None
    kernels: int | None


def _time_on_rank(worker: Worker, shares: Shares, mode: CUDAGraphMode, steps: int) -> _Timing | None:
    """Run and time the steps on one rank, which all ranks do at the same time; None: its engine has no request."""
    runner, timed = worker.loaded.runner, share_of(shares, worker.loaded)
    if timed is None:
        return None
    num_computed, device = runner.step.states.num_computed_tokens, runner.step.buffers.input_ids.device
    with torch.no_grad():
        start, dispatched, run = timed.prepared(runner, mode)
        num_computed.copy_(start)
        for _ in range(WARMUP_STEPS):
            run()
        launches, kernels = count_launches(run, device)
        num_computed.copy_(start)
        each_s = time_steps(run, steps, device)
        num_computed.copy_(start)
        mean_s = mean_of_steps(run, steps, device)
    return _Timing(
        rank=worker.rank,
        mode=dispatched.mode,
        padded_tokens=dispatched.descriptor.num_tokens,
        reason=dispatched.reason,
        mean_s=mean_s,
        each_s=each_s,
        launches=launches,
        kernels=kernels,
    )


def time_steps(run: Callable[[], None], steps: int, device: torch.device) -> list[float]:
    """Return the seconds of each of `steps` runs, back to back: by CUDA events on a GPU, by the clock on a CPU."""
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


def mean_of_steps(run: Callable[[], None], steps: int, device: torch.device) -> float:
    """Return the mean seconds of `steps` runs, back to back, with no event between them.

    The time is that between two CUDA events on a GPU, and by the clock on a CPU.
    """
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(steps):
            run()
        return (time.perf_counter() - started) / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(steps):
        run()
    end.record()
    torch.cuda.synchronize(device)
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / steps


LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


def count_launches(run: Callable[[], None], device: torch.device) -> tuple[int | None, int | None]:
    """Return (host launches, kernels that the device ran) in one run, by torch's profiler; None on a CPU."""
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
