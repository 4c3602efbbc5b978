"""Measure the host time of a decode step, part by part, on any machine.

The engine and the runner are the real ones, over a device that finishes at once. `python -m
piecegraph.tools.bench.host_step` prints a table. The time that a GPU's driver takes for launches and copies is not
included; `piecegraph bench throughput --profile` measures that too.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import click
import torch

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.cudagraphs.dispatcher import Dispatcher
from piecegraph.runner.cudagraphs.policy import ResolvedMode
from piecegraph.runner.device_memory import staged_write
from piecegraph.runner.engine.engine import Engine
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.llm import LLM
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.scheduling.kv_cache_group import blocks_for
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.scheduler import Scheduler
from piecegraph.runner.step.model_step import ModelStep, StepOutput
from piecegraph.runner.step.state.input_buffers import InputBuffers
from piecegraph.runner.step.state.request_states import RequestStates
from piecegraph.tools.bench.step_profile import PARTS, StepClock

TOKEN = 5
"""The token that the device always draws; it ends no request."""

VOCAB_SIZE = 1000
WARM_UP_STEPS = 20


class InstantGraphs:
    """A stand-in for `CudaGraphManager` whose replay costs nothing and draws `TOKEN` for every request."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        token_ids = torch.full((max_num_reqs,), TOKEN, dtype=torch.int64, device=device)
        self._output = StepOutput(torch.zeros(max_num_reqs, VOCAB_SIZE, device=device), token_ids)
        self.num_replays = 0

    def replay_full(self, descriptor: BatchDescriptor) -> StepOutput:
        self.num_replays += 1
        return self._output

    def close(self) -> None:
        """Do nothing, because there is nothing to free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStep:
    """Milliseconds of the host in a decode step."""

    num_reqs: int
    steps: int
    p10_ms: Mapping[str, float]  # by the names of `PARTS`, and "total"; the steadiest where others use the machine
    median_ms: Mapping[str, float]
    p90_ms: Mapping[str, float]


def decoding_engine(
    num_reqs: int,
    *,
    num_steps: int,
    block_size: int = 16,
    steps_ahead: int = 1,
    is_final_only: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Engine, ModelRunner]:
    """Return an engine whose `num_reqs` requests have just begun to decode.

    The requests are at different places in their blocks, and decode for at least `num_steps` steps.
    """
    random = Random(seed)
    max_len = 8 * block_size + num_steps + 64
    max_blocks = blocks_for(max_len, block_size)
    on = torch.device(device)
    max_num_tokens = num_reqs * max_len
    sampler = Sampler(max_num_reqs=num_reqs, max_model_len=max_len, vocab_size=VOCAB_SIZE, device=on)
    step = SimpleNamespace(
        states=RequestStates(max_num_reqs=num_reqs, max_model_len=max_len, max_blocks=max_blocks, device=on),
        buffers=InputBuffers(max_num_tokens=max_num_tokens, max_num_reqs=num_reqs, max_blocks=max_blocks, device=on),
        sampler=sampler,
        slot_map=None,
        block_size=block_size,
    )
    runner = ModelRunner(
        step=cast(ModelStep, step),  # all of it that a FULL graph leaves to the host
        graphs=cast(Any, InstantGraphs(num_reqs, on)),
        dispatcher=Dispatcher(
            full=[
                BatchDescriptor(num_tokens=num_reqs, num_reqs=num_reqs, uniform_token_count=1),
                BatchDescriptor(num_tokens=max_num_tokens, num_reqs=num_reqs),
            ],
            piecewise=[],
            resolved=ResolvedMode(decode_mode=CUDAGraphMode.FULL, mixed_mode=CUDAGraphMode.FULL, reasons=()),
        ),
        needs_host_batch=False,
        strict=True,
    )
    kv_cache = KVCacheManager(
        num_blocks=2 * num_reqs * max_blocks, block_size=block_size, max_num_batched_tokens=max_num_tokens
    )
    engine = Engine(
        scheduler=Scheduler(kv_cache=kv_cache, max_num_seqs=num_reqs, max_num_batched_tokens=max_num_tokens),
        runner=runner,
        tokenizer=None,
        eos_token_ids=[1],
        max_model_len=max_len,
        vocab_size=VOCAB_SIZE,
        seed=seed,
        steps_ahead=steps_ahead,
    )
    params = SamplingParams(temperature=0.0, max_tokens=max_len, detokenize=False)
    for number in range(num_reqs):
        prompt = [random.randrange(2, VOCAB_SIZE) for _ in range(random.randrange(1, 8 * block_size))]
        engine.add_request(str(number), prompt, params, is_final_only=is_final_only)
    while any(len(request.output_token_ids) < 2 for request in engine.requests.values()):
        engine.step()
    return engine, runner


def measure_host_step(num_reqs: int = 256, num_steps: int = 400, **options: Any) -> HostStep:
    """Time `num_steps` decode steps of `num_reqs` requests, after a warm-up. `options` go to `decoding_engine`."""
    engine, runner = decoding_engine(num_reqs, num_steps=num_steps + WARM_UP_STEPS, **options)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    with (
        _without_gc(),
        _without_device_writes(),
        StepClock(cast(LLM, SimpleNamespace(engine=engine, runner=runner))) as clock,
    ):
        for _ in range(num_steps):
            engine.step()
    assert all(step.is_decode and step.batch_size == num_reqs for step in clock.steps)
    names = [name for name in PARTS if name != "between_steps"]
    times = {name: [1e3 * step.parts[name] for step in clock.steps] for name in names}
    times["total"] = [sum(of_step) for of_step in zip(*times.values(), strict=True)]
    return HostStep(
        num_reqs=num_reqs,
        steps=len(clock.steps),
        p10_ms={name: _deciles(values)[0] for name, values in times.items()},
        median_ms={name: statistics.median(values) for name, values in times.items()},
        p90_ms={name: _deciles(values)[-1] for name, values in times.items()},
    )


def _deciles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=10, method="inclusive")


@contextmanager
def _without_gc() -> Iterator[None]:
    """Turn garbage collection off inside the block: a collection in one step of hundreds distorts that step."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _without_device_writes() -> Iterator[None]:
    """Replace kernels that write on the device by no-ops inside the block.

    The time of a kernel is not host time; on a CPU its stand-in takes longer than everything else in a step.
    """
    kept = staged_write.apply_writes_reference
    staged_write.apply_writes_reference = lambda tensor, packed: None
    try:
        yield
    finally:
        staged_write.apply_writes_reference = kept


@click.command()
@click.option("--num-reqs", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--num-steps", type=click.IntRange(min=10), default=400, show_default=True)
@click.option("--block-size", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--streams", is_flag=True, help="Callers read every token; else the end only, as LLM.generate does.")
@click.option("--device", default="cpu", show_default=True)
def main(num_reqs: int, num_steps: int, block_size: int, streams: bool, device: str) -> None:
    """Print host milliseconds of a decode step, by part."""
    found = measure_host_step(num_reqs, num_steps, block_size=block_size, is_final_only=not streams, device=device)
    click.echo(f"{found.num_reqs} requests, {found.steps} steps, block_size {block_size}: milliseconds")
    for name, median in found.median_ms.items():
        click.echo(f"{name:14} p10 {found.p10_ms[name]:7.4f}  median {median:7.4f}  p90 {found.p90_ms[name]:7.4f}")


if __name__ == "__main__":
    main()
