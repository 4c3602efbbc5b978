"""Piecegraph as one peer among others, measured as the peers measure themselves, through `generate` and the clock.

The command is `python -m piecegraph.tools.bench.compare.peer_record JOB`. JOB is a `PeerJob` as JSON. The last line of
stdout is one JSON object, with the names that other peers' objects have: `import_s`, `init_s`, `first_token_s`,
`start_to_first_token_s`, `tpot_ms` by batch size, `prefill_tok_s`, `offline_tok_s`, `offline_s`; and `floors`, the
best values these could have. A failure is a line on stderr and the exit code that the command line has for it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piecegraph.runner.llm import LLM
    from piecegraph.tools.bench.measure.ceilings import Ceilings

LARGEST_TOKEN_ID = 10_000  # of a prompt, as in the peers' benches


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJob:
    """The workloads to run; the numbers are those of the peers' benches."""

    model: str
    arguments: dict[str, Any]  # of `LLM`
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
        return max(self.prompt_tokens + self.decode_tokens + 1, self.prefill[1] + 1, offline)

    @property
    def most_requests(self) -> int:
        """The largest number of requests that run at once."""
        return max(*self.batch_sizes, self.prefill[0], self.offline_requests)


def measure_as_peer(job: PeerJob) -> dict[str, Any]:
    """Measure everything that the module's docstring lists. Times begin with the first import, as the peers' do."""
    began = time.perf_counter()
    import piecegraph.runner.startup.load_engine  # noqa: F401  the weight of it, which making an `LLM` would import
    from piecegraph.runner.llm import LLM
    from piecegraph.tools.bench.measure.ceilings import measure_ceilings

    imported = time.perf_counter()
    arguments = {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,  # a workload that is run again may find nothing of the time before
        "max_model_len": job.longest,
        "max_num_seqs": job.most_requests,
        **job.arguments,
    }
    with LLM(job.model, **arguments) as llm:
        ready = time.perf_counter()
        prompts = _Prompts(llm.engine.vocab_size)
        first_token_s = generate_seconds(llm, prompts.make(1, min(16, job.prompt_tokens)), 2)
        record: dict[str, Any] = {
            "peer": "piecegraph",
            "import_s": imported - began,
            "init_s": ready - imported,
            "first_token_s": first_token_s,
            "start_to_first_token_s": time.perf_counter() - began,
            "tpot_ms": {str(size): tpot_ms(llm, prompts, size, job) for size in job.batch_sizes},
            "prefill_tok_s": prefill_rate(llm, prompts, *job.prefill),
        }
        ceilings = measure_ceilings(llm.runner.step.buffers.input_ids.device, llm.model_config.dtype)
        record["floors"] = floors(llm, job, ceilings)
        if job.offline_requests:
            offline(llm, job, ceilings, record)
        return record


class _Prompts:
    """A source of random token ids, new ones at each call."""

    def __init__(self, vocab_size: int) -> None:
        self._random = Random(0)
        self._largest = min(LARGEST_TOKEN_ID, vocab_size - 1)

    def make(self, num_requests: int, num_tokens: int) -> list[list[int]]:
        return [[self._random.randint(0, self._largest) for _ in range(num_tokens)] for _ in range(num_requests)]


def generate_seconds(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> float:
    """Return the seconds it takes to generate `num_tokens` greedy tokens for each prompt."""
    from piecegraph.runner.common.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - started


def tpot_ms(llm: LLM, prompts: _Prompts, batch_size: int, job: PeerJob) -> float:
    """Return milliseconds per decode step: the better of two differences between long answers and answers of one
    token.
    """
    found = []
    for _ in range(2):
        batch = prompts.make(batch_size, job.prompt_tokens)
        one = generate_seconds(llm, batch, 1)
        found.append((generate_seconds(llm, batch, job.decode_tokens + 1) - one) / job.decode_tokens)
    return 1e3 * min(found)


def prefill_rate(llm: LLM, prompts: _Prompts, num_requests: int, num_tokens: int) -> float:
    """Return prompt tokens per second, measured on the second run."""
    generate_seconds(llm, prompts.make(num_requests, num_tokens), 1)
    return num_requests * num_tokens / generate_seconds(llm, prompts.make(num_requests, num_tokens), 1)


def floors(llm: LLM, job: PeerJob, ceilings: Ceilings) -> dict[str, Any]:
    """Return the best that decode steps and the prefill can reach, at rates measured in this process."""
    from piecegraph.tools.bench.latency import model_size
    from piecegraph.tools.bench.measure.floor import floor_seconds
    from piecegraph.tools.bench.throughput import Lengths, workload_floor_seconds

    size, buffers = model_size(llm), llm.runner.step.buffers
    context = job.prompt_tokens + job.decode_tokens / 2
    num_requests, num_tokens = job.prefill
    prefill_s = workload_floor_seconds(
        size,
        ceilings,
        [Lengths(num_tokens, 1)] * num_requests,
        max_num_seqs=buffers.max_num_reqs,
        max_num_batched_tokens=buffers.max_num_tokens,
    )
    return {
        "tpot_ms": {str(batch): 1e3 * floor_seconds(size, ceilings, batch, context) for batch in job.batch_sizes},
        "prefill_tok_s": num_requests * num_tokens / prefill_s,
    }


def offline(llm: LLM, job: PeerJob, ceilings: Ceilings, record: dict[str, Any]) -> None:
    """Run nano-vllm's workload at temperature 0.6, and write its figures into `record`."""
    from piecegraph.tools.bench.latency import model_size
    from piecegraph.tools.bench.throughput import generate, make_workload, workload_floor_seconds

    low, high = job.offline_tokens
    vocab_size, buffers = llm.engine.vocab_size, llm.runner.step.buffers
    workload = make_workload(job.offline_requests, (low, high), (low, high), vocab_size=vocab_size, seed=0)
    num_tokens = sum(workload.output_lens)
    seconds = generate(llm, workload, 0.6)
    floor_s = workload_floor_seconds(
        model_size(llm),
        ceilings,
        workload.lengths,
        max_num_seqs=buffers.max_num_reqs,
        max_num_batched_tokens=buffers.max_num_tokens,
    )
    record |= {"offline_tok_s": num_tokens / seconds, "offline_s": seconds}
    record["floors"] |= {"offline_tok_s": num_tokens / floor_s, "offline_s": floor_s}


def main() -> int:
    from piecegraph.tools.command_line.failures import exit_code_of, show

    try:
        record = measure_as_peer(PeerJob(**json.loads(sys.argv[1])))
    except Exception as error:
        show(error, debug=False)
        return exit_code_of(error)
    sys.stdout.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
