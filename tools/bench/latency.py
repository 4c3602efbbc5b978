"""Measure milliseconds of a step, by batch size and mode, beside the floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError
from piecegraph.runner.attention.interface.layer import attention_layers
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.cudagraphs.dispatcher import Dispatched
from piecegraph.runner.distributed.worker import Worker
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.llm import LLM
from piecegraph.runner.scheduling.scheduler_output import ScheduledRequest
from piecegraph.runner.step.batch import Batch
from piecegraph.tools.bench.measure.ceilings import Ceilings
from piecegraph.tools.bench.measure.floor import ModelSize, RoutedExperts, floor_seconds

WARMUP_STEPS = 5


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


def model_size(llm: LLM) -> ModelSize:
    """Return what a step reads: every parameter except an embedding that no matmul uses.

    Quantised weights count with the bytes that they are stored in; a byte of uint8 holds two parameters.
    """
    layers = attention_layers(llm.compiled.split_calls)
    tensors = {t.data_ptr(): (name, t) for name, t in llm.compiled.bound_tensors() if _is_weight(t)}
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
        if tensor.dim() == 3:  # one matrix an expert
            num_experts = tensor.shape[0]
            expert_params += tensor.numel()
            expert_bytes += tensor.numel() * tensor.element_size()
    top_k = getattr(llm.hf_config.get_text_config(decoder=True), "num_experts_per_tok", None)
    experts = None
    if num_experts and top_k:
        experts = RoutedExperts(params=expert_params, num_bytes=expert_bytes, num_experts=num_experts, top_k=top_k)
    return ModelSize(
        matmul_params=params, logits_params=logits_params, weight_bytes=size_bytes, layers=layers, experts=experts
    )


def _is_weight(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.dtype in (torch.int8, torch.uint8)


def _num_params(name: str, tensor: torch.Tensor) -> int:
    """Return the parameters that the values of a tensor are: none for the scales of quantised ones."""
    if name.endswith("weight_scale"):
        return 0
    return tensor.numel() * (2 if tensor.dtype is torch.uint8 else 1)


def floor_notes(num_ranks: int) -> tuple[str, ...]:
    """Return what to know of the floor where `num_ranks` ranks divide each layer; nothing for one."""
    if num_ranks == 1:
        return ()
    return (
        f"times and kernels are rank 0's, and the floor is of what one of {num_ranks} ranks reads and computes: sums "
        "over the ranks are in the times and not in the floor",
    )


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
    host in between. Raises `ConfigError` if the requests do not fit.
    """
    size = model_size(llm)
    rows: list[LatencyRow] = []
    for batch_size in batch_sizes:
        with DecodeBatch(llm, batch_size, context, steps, prefill_tokens) as batch:
            for mode in modes:
                at_end = context if prefill_tokens else context + steps
                floor_s = floor_seconds(size, ceilings, batch_size, (context + at_end) / 2, prefill_tokens)
                rows.append(batch.time(mode, steps, floor_s))
                on_row(rows[-1])
    return rows


class DecodeBatch:
    """A batch of requests whose prompts are computed, and long enough for every step that is timed.

    Steps are driven without the scheduler, from `context` tokens on, over the blocks and tokens that the requests
    have.
    """

    def __init__(self, llm: LLM, batch_size: int, context: int, steps: int, prefill_tokens: int) -> None:
        self._llm, self._batch_size, self._context = llm, batch_size, context
        self._ids = [f"latency-{batch_size}-{i}" for i in range(batch_size + (prefill_tokens > 0))]
        decoded = context + steps + WARMUP_STEPS + 2
        lens = [decoded] * batch_size + [prefill_tokens] * (prefill_tokens > 0)
        meanwhile = 2 + sum(lens) // llm.runner.step.buffers.max_num_tokens + len(lens)  # decoded before all are there
        if max(lens) + 2 > llm.max_model_len:
            raise ConfigError(
                f"{max(lens) + 2} tokens a request do not fit max_model_len={llm.max_model_len}; raise it."
            )
        generator = torch.Generator().manual_seed(0)
        for request_id, num_tokens in zip(self._ids, lens, strict=True):
            room = llm.max_model_len - num_tokens
            params = SamplingParams(temperature=0.0, max_tokens=min(room, meanwhile), ignore_eos=True, detokenize=False)
            prompt = torch.randint(llm.engine.vocab_size, (num_tokens,), generator=generator).tolist()
            llm.engine.add_request(request_id, prompt, params, is_final_only=True)
        decode = (1,) * batch_size
        batch = Batch(
            request_ids=tuple(self._ids),
            query_lens=(*decode, prefill_tokens) if prefill_tokens else decode,
            num_decode_reqs=batch_size,
        )
        self._steps = _Steps(batch=batch, context=context, prefill_tokens=prefill_tokens)

    def __enter__(self) -> DecodeBatch:
        engine = self._llm.engine
        while not all(map(self._is_computed, self._ids)):
            engine.step()
        return self

    def _is_computed(self, request_id: str) -> bool:
        request = self._llm.engine.requests.get(request_id)
        if request is None:
            raise ConfigError(
                f"{self._batch_size} requests of {self._context} tokens do not run at once: some ended before others "
                "began. Raise max_num_seqs or max_model_len, or give the cache more memory."
            )
        return request.num_computed_tokens >= request.num_prompt_tokens

    def __exit__(self, *exc_info: object) -> None:
        for request_id in self._ids:
            self._llm.engine.abort(request_id)

    def time(self, mode: CUDAGraphMode, steps: int, floor_s: float) -> LatencyRow:
        """Time `steps` steps on all ranks at once, and return rank 0's times."""
        timing: _Timing = self._llm.collective_rpc(_time_on_rank, args=(self._steps, mode, steps))[0]
        each = timing.each_s
        deciles = statistics.quantiles(each, n=10) if len(each) > 1 else [each[0]] * 9
        return LatencyRow(
            batch_size=self._batch_size,
            prefill_tokens=self._steps.prefill_tokens,
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

    def run_once(self, mode: CUDAGraphMode) -> None:
        """Run one step, from `context` tokens on."""
        with torch.no_grad():
            start, _, run = self._steps.prepared(self._llm.runner, mode)
            self._llm.runner.step.states.num_computed_tokens.copy_(start)
            run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    """What one rank measured."""

    mode: CUDAGraphMode
    padded_tokens: int
    reason: str | None
    mean_s: float
    each_s: list[float]
    launches: int | None
    kernels: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """The steps that are timed; every rank runs them over its own state of the same requests."""

    batch: Batch
    context: int
    prefill_tokens: int

    def prepared(self, runner: ModelRunner, mode: CUDAGraphMode) -> tuple[torch.Tensor, Dispatched, Callable[[], None]]:
        """Return each row's computed tokens at the first step, how steps run, and the function that runs one."""
        batch, states = self.batch, runner.step.states
        num_computed = states.num_computed_tokens
        start = torch.full_like(num_computed, self.context)
        if self.prefill_tokens:
            start[states.row(batch.request_ids[-1])] = 0
        scheduled = [
            ScheduledRequest(request_id, query_len, self.context if query_len == 1 else 0, False, 0)
            for request_id, query_len in zip(batch.request_ids, batch.query_lens, strict=True)
        ]
        dispatched = runner.dispatch(batch, mode)

        def run() -> None:
            if self.prefill_tokens:
                num_computed.copy_(start)  # the same step again
            runner.run(batch, dispatched, scheduled)

        return start, dispatched, run


def _time_on_rank(worker: Worker, timed: _Steps, mode: CUDAGraphMode, steps: int) -> _Timing:
    """Run and time the steps on one rank, which all ranks do at the same time."""
    runner = worker.loaded.runner
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
