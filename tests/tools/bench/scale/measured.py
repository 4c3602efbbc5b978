"""Compare `piecegraph bench scale` with two processes on this machine, each with one thread.

`OMP_NUM_THREADS=1 python -m tests.tools.bench.scale.measured --rounds 7` measures, in turns, one process, TP 2 and DP 2
over the same requests, and prints what is simulated from the parts beside what was measured. The parts:

- step times of the model in one process: alone for one process, and beside a second process that runs the same steps
  for two. GPUs do not slow one another, but two processes on one machine share its memory and perhaps one core's units.
- step times of the share of one of two ranks, in one process beside another that runs the same; they tell what two
  ranks divide of a step.
- the alpha and beta of gloo, from what sums between the ranks add to a chain of products as long as a step's, so that
  they include the waits for the slower rank.

None of them comes from a step of TP 2 or DP 2.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
from transformers import LlamaConfig

from piecegraph import LLM, SamplingParams
from piecegraph.compiler.common.private_folder import scratch_folder
from piecegraph.passes.ops.collectives import ALL_REDUCE
from piecegraph.runner.distributed.worker import Worker
from piecegraph.tools.bench.scale.command import model_size
from piecegraph.tools.bench.scale.layout_cost import Layout, Link, RankTimes, StepTimes
from piecegraph.tools.bench.scale.shard import shard_folder
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
NUM_CHAINS = 40
LAYOUTS = {"TP 2": Layout(tensor=2, pipeline=1, data=1), "DP 2": Layout(tensor=1, pipeline=1, data=2)}


def sums(worker: Worker) -> list[tuple[int, float]]:
    """Return bytes of a sum between the ranks and the seconds that it adds to a chain of products, as in a step.

    Each product reads as many bytes as a rank does between two sums of a step. The chains with sums and those without
    take turns; the seconds are the means of both, subtracted: a run's time is the sum of its steps, the slow ones too.
    """
    num_sums = 2 * CONFIG.num_hidden_layers + 1
    weights = [torch.ones(CONFIG.intermediate_size, CONFIG.hidden_size) for _ in range(num_sums)]
    x, found = torch.ones(NUM_REQUESTS, CONFIG.hidden_size), []
    for num_values in (64, 4096, 131_072):
        values = torch.ones(num_values)

        def chain(values: torch.Tensor | None) -> float:
            began = time.perf_counter()
            for weight in weights:
                x @ weight.t()
                if values is not None:
                    ALL_REDUCE(values)
            return time.perf_counter() - began

        alone, summed = [], []
        for _ in range(NUM_CHAINS):
            ALL_REDUCE(values)  # both ranks begin together
            alone.append(chain(None))
            ALL_REDUCE(values)
            summed.append(chain(values))
        found.append((values.nbytes, (statistics.fmean(summed) - statistics.fmean(alone)) / num_sums))
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
def neighbour(folder: Path) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Start a process that runs the same steps inside the blocks of what this yields, and is idle otherwise."""
    context = multiprocessing.get_context("spawn")
    is_running, is_idle = context.Event(), context.Event()
    process = context.Process(target=run_beside, args=(folder, is_running, is_idle), daemon=True)

    @contextmanager
    def running() -> Iterator[None]:
        is_running.set()
        while is_idle.is_set():
            time.sleep(0.01)
        yield
        is_running.clear()
        assert is_idle.wait(120), "the requests beside these did not end"

    process.start()
    try:
        assert is_idle.wait(120), "the process beside this one did not start"
        yield running
    finally:
        process.kill()
        process.join()


def format_step_times(name: str, times: StepTimes) -> str:
    """Return step times as a line."""
    pairs = zip(times.tokens, times.seconds, strict=True)
    return f"step times {name}: " + ", ".join(f"{count} tokens {1e3 * s:.2f} ms" for count, s in pairs)


@dataclass(frozen=True, slots=True)
class Measured:
    """What rounds have measured, a figure of each round in every list."""

    steps: dict[str, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    rates: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    sums: list[list[tuple[int, float]]] = field(default_factory=list)

    def add_steps(self, name: str, seconds: dict[int, list[float]]) -> None:
        """Add the mean seconds of a round's steps by their tokens."""
        for num_tokens, each in seconds.items():
            self.steps[name][num_tokens].append(statistics.fmean(each))

    def times(self, name: str) -> StepTimes:
        """Return the medians over the rounds."""
        found = {num_tokens: statistics.median(each) for num_tokens, each in sorted(self.steps[name].items())}
        return StepTimes(tuple(found), tuple(found.values()))

    def link(self) -> Link:
        """Return alpha and beta of messages, from the smallest and the largest of sums between two ranks."""
        medians = [statistics.median(each[i][1] for each in self.sums) for i in range(len(self.sums[0]))]
        small, large = self.sums[0][0][0], self.sums[0][-1][0]
        per_byte = max(medians[-1] - medians[0], 1e-9) / (large - small)  # two messages, each of half the bytes
        return Link(alpha_s=max(medians[0] - small * per_byte, 1e-9) / 2, bytes_per_s=1 / per_byte)


def main() -> None:
    """Measure and simulate, and print both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    CONFIG.architectures = ["LlamaForCausalLM"]
    with scratch_folder() as scratch, ExitStack() as opened:
        folder, shard = scratch / "whole", shard_folder(CONFIG, 2, scratch)
        CONFIG.save_pretrained(str(folder))
        layouts = {"one": {}, "TP 2": {"tensor_parallel_size": 2}, "DP 2": {"data_parallel_size": 2}}
        llms = {name: opened.enter_context(start(folder, **layout)) for name, layout in layouts.items()}
        parts = {"whole": llms["one"], "shard": opened.enter_context(start(shard))}
        besides = {"whole": opened.enter_context(neighbour(folder)), "shard": opened.enter_context(neighbour(shard))}
        measured = Measured()
        for round_number in range(options.rounds + 1):
            found = measured if round_number else Measured()  # the first round warms up
            found.add_steps("alone", measured_steps(llms["one"]))
            for name, beside in besides.items():
                with beside():
                    found.add_steps(f"{name} beside another", measured_steps(parts[name]))
            for name, llm in llms.items():
                found.rates[name].append(tokens_per_s(llm))
            found.sums.append(llms["TP 2"].collective_rpc(sums)[0])
    sys.stdout.write("\n".join(report(measured)) + "\n")


def measured_steps(llm: LLM) -> dict[int, list[float]]:
    """Return the seconds of steps of one request, of some and of all, by the tokens of the step."""
    found: dict[int, list[float]] = defaultdict(list)
    for count in (1, NUM_REQUESTS // 2, NUM_REQUESTS):
        step_seconds(llm, count, found)
    return found


def report(measured: Measured) -> list[str]:
    """Return what was measured, and what is simulated from it, in lines."""
    link, alone = measured.link(), RankTimes(whole=measured.times("alone"))
    two = RankTimes(whole=measured.times("whole beside another"), shard=measured.times("shard beside another"))
    lines = [format_step_times(name, measured.times(name)) for name in measured.steps]
    lines.append(f"gloo: alpha {link.alpha_s * 1e6:.0f} us, beta {link.bytes_per_s / 1e9:.2f} GB/s")
    lines.append(f"assumed: {two.assumption}")
    trace = poisson_trace(NUM_REQUESTS, None, PROMPT, OUTPUT, 0)
    for name, layout in {"one": Layout(tensor=1, pipeline=1, data=1), **LAYOUTS}.items():
        times = two if layout.num_gpus > 1 else alone
        simulated = simulate(trace, layout, times, model_size(CONFIG, 4), link).tokens_per_s
        rates = measured.rates[name]
        error = 100 * (simulated / statistics.median(rates) - 1)
        lines.append(
            f"{name}: measured {statistics.median(rates):.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f}), "
            f"simulated {simulated:.1f}, error {error:+.1f} %"
        )
    return lines


if __name__ == "__main__":
    # The ranks unpickle `sums` by its full name, so this runs as an imported module too.
    from tests.tools.bench.scale import measured

    measured.main()
