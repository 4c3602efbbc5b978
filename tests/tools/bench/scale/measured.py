"""Compare `piecegraph bench scale` with two processes on this machine, each with one thread.

`OMP_NUM_THREADS=1 python -m tests.tools.bench.scale.measured --rounds 7` measures, in turns, one process, TP 2 and DP 2
over the same requests. From one process come the step times: alone, for one process, and beside a second process that
runs the same steps, for two. GPUs do not slow one another, but two processes on one machine share its memory and
perhaps one core's units. From sums between the ranks of TP 2, each after a product as in a step, come the alpha and
beta of gloo, so that they include the wait for the slower rank. What is simulated from these is printed beside what was
measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
from transformers import LlamaConfig

from piecegraph import LLM, SamplingParams
from piecegraph.passes.ops.collectives import ALL_REDUCE
from piecegraph.runner.distributed.worker import Worker
from piecegraph.tools.bench.scale.command import model_size
from piecegraph.tools.bench.scale.layout_cost import Layout, Link, StepTimes
from piecegraph.tools.bench.scale.simulate import poisson_trace, simulate

NUM_REQUESTS, PROMPT, OUTPUT = 8, 32, 48
CONFIG = LlamaConfig(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=8192,
    max_position_embeddings=256,
)
LAYOUTS = {"TP 2": Layout(tensor=2, pipeline=1, data=1), "DP 2": Layout(tensor=1, pipeline=1, data=2)}


def sums(worker: Worker) -> list[tuple[int, float]]:
    """Return the bytes and the median seconds of sums between the ranks, each after a product like those of a step."""
    found, weight = [], torch.ones(CONFIG.intermediate_size, CONFIG.hidden_size)
    for num_values in (64, 4096, 131_072):
        x, seconds = torch.ones(num_values), []
        for _ in range(30):
            weight @ weight[: CONFIG.hidden_size].t()
            began = time.perf_counter()
            ALL_REDUCE(x)
            seconds.append(time.perf_counter() - began)
        found.append((x.nbytes, statistics.median(seconds)))
    return found


def start(folder: Path, **layout: int) -> LLM:
    return LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        compiler="eager",
        device="cpu",
        max_num_seqs=NUM_REQUESTS,
        num_kv_blocks=128,
        enable_prefix_caching=False,
        distributed_timeout_seconds=120,
        **layout,  # type: ignore[arg-type]
    )


def tokens_per_s(llm: LLM) -> float:
    """Run all requests at once, and return the output tokens per second."""
    prompts = [{"prompt_token_ids": [number + 3] * PROMPT} for number in range(NUM_REQUESTS)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return NUM_REQUESTS * OUTPUT / (time.perf_counter() - began)


def step_seconds(llm: LLM, num_requests: int, found: dict[int, list[float]]) -> None:
    """Run `num_requests` requests, and add each step's seconds to `found` under its number of tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    for number in range(num_requests):
        llm.engine.add_request(f"{num_requests} {number} {time.monotonic()}", [number + 3] * PROMPT, params)
    num_tokens = num_requests * PROMPT
    while llm.engine.has_unfinished:
        began = time.perf_counter()
        llm.engine.step()
        found[num_tokens].append(time.perf_counter() - began)
        num_tokens = num_requests


def run_beside(folder: Path, is_running: Event, is_idle: Event) -> None:
    """Run requests here while `is_running` is set, else set `is_idle`. The parent ends the process."""
    llm = start(folder)
    while True:
        is_idle.set()
        is_running.wait()
        is_idle.clear()
        while is_running.is_set():
            tokens_per_s(llm)


@contextmanager
def neighbour(folder: Path) -> Iterator[tuple[Event, Event]]:
    """Start a process that runs the same steps while the first event is set; the second says that it runs none."""
    context = multiprocessing.get_context("spawn")
    is_running, is_idle = context.Event(), context.Event()
    process = context.Process(target=run_beside, args=(folder, is_running, is_idle), daemon=True)
    process.start()
    try:
        assert is_idle.wait(120), "the process beside this one did not start"
        yield is_running, is_idle
    finally:
        process.kill()
        process.join()


def medians(steps: dict[int, list[float]]) -> StepTimes:
    """Return the median seconds by the tokens of a step."""
    found = {num_tokens: statistics.median(seconds) for num_tokens, seconds in sorted(steps.items())}
    return StepTimes(tuple(found), tuple(found.values()))


def format_step_times(name: str, times: StepTimes) -> str:
    """Return step times as a line."""
    pairs = zip(times.tokens, times.seconds, strict=True)
    return f"step times {name}: " + ", ".join(f"{count} tokens {1e3 * s:.2f} ms" for count, s in pairs)


def fit(points: list[tuple[int, float]]) -> Link:
    """Return alpha and beta of messages, from the smallest and the largest of sums between two ranks."""
    (small, small_s), *_, (large, large_s) = points
    per_byte = max(large_s - small_s, 1e-9) / (large - small)  # two messages, each of half the bytes
    return Link(alpha_s=max(small_s - small * per_byte, 1e-9) / 2, bytes_per_s=1 / per_byte)


def main() -> None:
    """Measure and simulate, and print both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    alone: dict[int, list[float]] = defaultdict(list)
    beside: dict[int, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    points: list[list[tuple[int, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        CONFIG.architectures = ["LlamaForCausalLM"]
        CONFIG.save_pretrained(name)
        folder = Path(name)
        one = start(folder)
        two = {"TP 2": start(folder, tensor_parallel_size=2), "DP 2": start(folder, data_parallel_size=2)}
        with neighbour(folder) as (is_running, is_idle):
            for round_number in range(options.rounds + 1):
                times = measured_steps(one)
                is_running.set()
                while is_idle.is_set():
                    time.sleep(0.01)
                times_beside = measured_steps(one)
                is_running.clear()
                assert is_idle.wait(120), "the requests beside these did not end"
                measured = {"one": tokens_per_s(one), **{layout: tokens_per_s(llm) for layout, llm in two.items()}}
                found = two["TP 2"].collective_rpc(sums)[0]
                if not round_number:  # the first warms up
                    continue
                points.append(found)
                for num_tokens in times:
                    alone[num_tokens].append(statistics.median(times[num_tokens]))
                    beside[num_tokens].append(statistics.median(times_beside[num_tokens]))
                for layout, rate in measured.items():
                    rates[layout].append(rate)
        for each in (one, *two.values()):
            each.close()
    report(medians(alone), medians(beside), rates, points)


def measured_steps(llm: LLM) -> dict[int, list[float]]:
    """Return the seconds of steps of one request, of some and of all, by the tokens of the step."""
    found: dict[int, list[float]] = defaultdict(list)
    for count in (1, NUM_REQUESTS // 2, NUM_REQUESTS):
        step_seconds(llm, count, found)
    return found


def report(
    alone: StepTimes, beside: StepTimes, rates: dict[str, list[float]], points: list[list[tuple[int, float]]]
) -> None:
    """Print what was measured, and what is simulated from it."""
    link = fit([(size, statistics.median(each[i][1] for each in points)) for i, (size, _) in enumerate(points[0])])
    lines = [format_step_times("alone", alone), format_step_times("beside another", beside)]
    lines.append(f"gloo: alpha {link.alpha_s * 1e6:.0f} us, beta {link.bytes_per_s / 1e9:.2f} GB/s")
    trace = poisson_trace(NUM_REQUESTS, None, PROMPT, OUTPUT, 0)
    for name, simulated_layout in {"one": Layout(tensor=1, pipeline=1, data=1), **LAYOUTS}.items():
        times = beside if simulated_layout.num_gpus > 1 else alone
        simulated = simulate(trace, simulated_layout, times, model_size(CONFIG, 4), link).tokens_per_s
        measured_rate = statistics.median(rates[name])
        spread = f"{min(rates[name]):.1f} to {max(rates[name]):.1f}"
        lines.append(
            f"{name}: measured {measured_rate:.1f} tokens/s ({spread}), simulated {simulated:.1f}, "
            f"error {100 * (simulated / measured_rate - 1):+.1f} %"
        )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    # The ranks unpickle `sums` by its full name, so this runs as an imported module too.
    from tests.tools.bench.scale import measured

    measured.main()
