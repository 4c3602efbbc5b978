"""What every program of `piecegraph bench compare` measures, and how, whatever it runs a model with.

This file imports neither torch nor ours, so that a peer can use it in an environment of its own.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from piecegraph.tools.bench.measure.offline_workload import LARGEST_TOKEN_ID

Generate = Callable[[Sequence[list[int]], int], list[list[int]]]
"""A function that generates so many greedy tokens for each prompt, end-of-text tokens or not, and returns them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJob:
    """The workloads to run; the numbers are those of the peers' benches."""

    model: str
    arguments: dict[str, Any] = field(default_factory=dict)  # of our `LLM`
    batch_sizes: Sequence[int] = (1, 8, 32, 128, 256)
    prompt_tokens: int = 512
    decode_tokens: int = 128
    prefill: Sequence[int] = (8, 2048)  # requests, and tokens of each
    offline_requests: int = 256  # 0: no offline workload
    offline_tokens: Sequence[int] = (100, 1024)  # of prompts, and of outputs; both included

    @property
    def longest(self) -> int:
        """The number of tokens of the longest request."""
        offline = 2 * self.offline_tokens[1] if self.offline_requests else 0
        return max(self.prompt_tokens + self.decode_tokens + 1, self.prefill[1] + 1, 2 * CHECKED_TOKENS, offline)

    @property
    def most_requests(self) -> int:
        """The largest number of requests that run at once."""
        return max(*self.batch_sizes, self.prefill[0], self.offline_requests)


CHECKED_TOKENS = 16
"""The tokens of the prompt, and of the answer, by which programs are compared with one another."""


class Prompts:
    """A source of random token ids, new ones at each call, the same in each program."""

    def __init__(self, vocab_size: int) -> None:
        self._random = Random(0)
        self._largest = min(LARGEST_TOKEN_ID, vocab_size - 1)

    def make(self, num_requests: int, num_tokens: int) -> list[list[int]]:
        """Return so many prompts of `num_tokens` ids each."""
        return [[self._random.randint(0, self._largest) for _ in range(num_tokens)] for _ in range(num_requests)]


def measure_job(
    job: PeerJob, name: str, import_it: Callable[[], object], load: Callable[[], tuple[Generate, int]]
) -> dict[str, Any]:
    """Return the record of a program: `import_it` imports, `load` returns how it generates, and its vocabulary.

    The names in it are those of the module docstring of `peer_record`, without `floors` and an offline workload.
    """
    began = time.perf_counter()
    import_it()
    imported = time.perf_counter()
    generate, vocab_size = load()
    ready = time.perf_counter()
    return {"peer": name, "import_s": imported - began, "init_s": ready - imported} | measured(
        job, generate, Prompts(vocab_size), began
    )


def measured(job: PeerJob, generate: Generate, prompts: Prompts, began: float) -> dict[str, Any]:
    """Return the figures and the checked tokens of a program that is ready. `began`: when it began to import."""
    first = time.perf_counter()
    generate(prompts.make(1, min(CHECKED_TOKENS, job.prompt_tokens)), 2)
    figures = {"first_token_s": time.perf_counter() - first, "start_to_first_token_s": time.perf_counter() - began}
    (greedy,) = generate(prompts.make(1, CHECKED_TOKENS), CHECKED_TOKENS)
    steps = {str(size): decode_ms(generate, prompts, size, job) for size in job.batch_sizes}
    return {
        **figures,
        "greedy_tokens": greedy,
        "tpot_ms": {size: wall for size, (wall, _) in steps.items()},
        "tpot_processor_ms": {size: processor for size, (_, processor) in steps.items()},
        "prefill_tok_s": prefill_rate(generate, prompts, *job.prefill),
        "peak_rss_bytes": peak_rss_bytes(),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What a call took: by the clock, and of processor time, all threads together."""

    wall_s: float
    processor_s: float


def timed(generate: Generate, prompts: Sequence[list[int]], num_tokens: int) -> Took:
    """Generate `num_tokens` tokens for each prompt, and return what that took."""
    wall, processor = time.perf_counter(), time.process_time()
    generate(prompts, num_tokens)
    return Took(wall_s=time.perf_counter() - wall, processor_s=time.process_time() - processor)


def decode_ms(generate: Generate, prompts: Prompts, batch_size: int, job: PeerJob) -> tuple[float, float]:
    """Return milliseconds per decode step by the clock, and of processor time.

    Each is the better of two differences between long answers and answers of one token, after an answer of two tokens
    for whatever is compiled or allocated once for a size.
    """
    generate(prompts.make(batch_size, job.prompt_tokens), 2)
    wall, processor = [], []
    for _ in range(2):
        batch = prompts.make(batch_size, job.prompt_tokens)
        one, many = timed(generate, batch, 1), timed(generate, batch, job.decode_tokens + 1)
        wall.append(many.wall_s - one.wall_s)
        processor.append(many.processor_s - one.processor_s)
    return 1e3 * min(wall) / job.decode_tokens, 1e3 * min(processor) / job.decode_tokens


def prefill_rate(generate: Generate, prompts: Prompts, num_requests: int, num_tokens: int) -> float:
    """Return prompt tokens per second, measured on the second run."""
    timed(generate, prompts.make(num_requests, num_tokens), 1)
    return num_requests * num_tokens / timed(generate, prompts.make(num_requests, num_tokens), 1).wall_s


def peak_rss_bytes() -> int:
    """Return the largest memory of this process so far, files that it maps included."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def job_of(text: str) -> PeerJob:
    """Return the job that `{job}` in the command of a peer stands for."""
    return PeerJob(**json.loads(text))
