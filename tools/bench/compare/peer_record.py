"""Piecegraph as one peer among others, measured as the peers measure themselves, through `generate` and the clock.

The command is `python -m piecegraph.tools.bench.compare.peer_record JOB`. JOB is a `PeerJob` as JSON. The last line of
stdout is one JSON object, with the names that other peers' objects have: `import_s`, `init_s`, `first_token_s`,
`start_to_first_token_s`, `tpot_ms` by batch size and `tpot_processor_ms` (processor time of all threads),
`prefill_tok_s`, `peak_rss_bytes`, `offline_tok_s`, `offline_s`; `greedy_tokens`, by which programs are checked against
one another; and `floors`, the best values these could have. With several engines `tpot_processor_ms` and
`peak_rss_bytes` are those of the front door's process alone. A failure is a line on stderr and the exit code that the
command line has for it.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from piecegraph.tools.bench.compare.workload import PeerJob, Prompts, job_of, measured

if TYPE_CHECKING:
    from piecegraph.runner.llm import LLM
    from piecegraph.tools.bench.measure.ceilings import Ceilings


def measure_as_peer(job: PeerJob) -> dict[str, Any]:
    """Measure everything that the module's docstring lists. Times begin with the first import, as the peers' do."""
    began = time.perf_counter()
    import piecegraph.runner.startup.load_engine  # noqa: F401  the weight of it, which making an `LLM` would import
    from piecegraph.runner.llm import LLM
    from piecegraph.tools.bench.measure.engines import measure_engines

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
        record: dict[str, Any] = {"peer": "piecegraph", "import_s": imported - began, "init_s": ready - imported}
        record |= measured(job, functools.partial(generate_tokens, llm), Prompts(llm.engine.vocab_size), began)
        ceilings = measure_engines(llm)
        record["floors"] = floors(llm, job, ceilings)
        if job.offline_requests:
            offline(llm, job, ceilings, record)
        return record


def generate_tokens(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Return `num_tokens` greedy tokens for each prompt."""
    from piecegraph.runner.common.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def floors(llm: LLM, job: PeerJob, ceilings: Ceilings) -> dict[str, Any]:
    """Return the best that decode steps and the prefill can reach, at rates measured in this run.

    With several engines a batch is divided among them evenly.
    """
    from piecegraph.tools.bench.latency import model_size
    from piecegraph.tools.bench.measure.engines import from_engines
    from piecegraph.tools.bench.measure.floor import floor_seconds
    from piecegraph.tools.bench.measure.offline_workload import Lengths
    from piecegraph.tools.bench.throughput import workload_floor

    sizes = from_engines(llm, model_size)
    context = job.prompt_tokens + job.decode_tokens / 2
    num_requests, num_tokens = job.prefill
    prefill_s = workload_floor(llm, ceilings, [Lengths(num_tokens, 1)] * num_requests)
    return {
        "tpot_ms": {
            str(batch): 1e3 * floor_seconds(sizes[0], ceilings, -(-batch // len(sizes)), context)
            for batch in job.batch_sizes
        },
        "prefill_tok_s": num_requests * num_tokens / prefill_s,
    }


def offline(llm: LLM, job: PeerJob, ceilings: Ceilings, record: dict[str, Any]) -> None:
    """Run nano-vllm's workload at temperature 0.6, and write its figures into `record`."""
    from piecegraph.tools.bench.measure.offline_workload import make_workload
    from piecegraph.tools.bench.throughput import generate, workload_floor

    low, high = job.offline_tokens
    workload = make_workload(job.offline_requests, (low, high), (low, high), vocab_size=llm.engine.vocab_size, seed=0)
    num_tokens = sum(workload.output_lens)
    seconds = generate(llm, workload, 0.6)
    floor_s = workload_floor(llm, ceilings, workload.lengths)
    record |= {"offline_tok_s": num_tokens / seconds, "offline_s": seconds}
    record["floors"] |= {"offline_tok_s": num_tokens / floor_s, "offline_s": floor_s}


def main() -> int:
    from piecegraph.tools.command_line.failures import exit_code_of, show

    try:
        record = measure_as_peer(job_of(sys.argv[1]))
    except Exception as error:
        show(error, debug=False)
        return exit_code_of(error)
    sys.stdout.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
