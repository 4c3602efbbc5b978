"""llama.cpp as a peer, greedy, through llama-cpp-python.

The command is `python -m piecegraph.tools.bench.compare.llama_cpp_peer`. Arguments are `{job}`, whose model is a .gguf
file, and the number of threads. It runs in an environment of its own (`make peers`), with numpy and without torch.
Sequences decode in one batch of llama.cpp's.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from piecegraph.tools.bench.compare.workload import Generate, PeerJob, job_of, measure_job


def generator(job: PeerJob, num_threads: int) -> tuple[Generate, int]:
    """Return the function that generates with the file's model, whose weights stay in their blocks."""
    import numpy as np

    api: Any = importlib.import_module("llama_cpp")
    silence = api.llama_log_callback(lambda level, text, data: None)  # C code holds it as long as `generate` lives
    api.llama_log_set(silence, None)
    model = api.llama_model_load_from_file(job.model.encode(), api.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot read {job.model}; its model must be a .gguf file.")
    most = max(*job.batch_sizes, job.prefill[0])
    params = api.llama_context_default_params()
    params.n_ctx = most * (job.longest + 64)
    params.n_seq_max = most
    params.n_batch = params.n_ubatch = max(job.prefill[0] * job.prefill[1], most * job.prompt_tokens, 512)
    params.n_threads = params.n_threads_batch = num_threads
    context = api.llama_init_from_model(model, params)
    vocab_size = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)))
    batch = api.llama_batch_init(params.n_batch, 0, 1)

    def step(rows: Sequence[list[int]], start: int) -> list[int]:
        """Compute the next tokens of each sequence, from position `start` on, and return the greedy ones."""
        at = 0
        last = []
        for sequence, tokens in enumerate(rows):
            for position, token in enumerate(tokens, start):
                batch.token[at], batch.pos[at] = token, position
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = position == start + len(tokens) - 1
                at += 1
            last.append(at - 1)
        batch.n_tokens = at
        if api.llama_decode(context, batch) != 0:
            raise SystemExit(f"llama.cpp cannot decode a batch of {at} tokens.")
        logits = (np.ctypeslib.as_array(api.llama_get_logits_ith(context, row), shape=(vocab_size,)) for row in last)
        return [int(each.argmax()) for each in logits]

    def generate(prompts: Sequence[list[int]], num_tokens: int, held: object = silence) -> list[list[int]]:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        start, rows = 0, list(prompts)
        answers: list[list[int]] = [[] for _ in prompts]
        for _ in range(num_tokens):
            tokens = step(rows, start)
            start += len(rows[0])
            rows = [[token] for token in tokens]
            for answer, token in zip(answers, tokens, strict=True):
                answer.append(token)
        return answers

    return generate, vocab_size


def import_it() -> None:
    """Import llama.cpp. Raises `SystemExit` with what to do if it is missing."""
    try:
        importlib.import_module("llama_cpp")
    except ImportError as error:
        raise SystemExit(f"llama-cpp-python is missing ({error}); `make peers` builds it in .venv-peers.") from error


def main(arguments: Sequence[str]) -> int:
    job, num_threads = arguments
    record = measure_job(job_of(job), "llama.cpp", import_it, lambda: generator(job_of(job), int(num_threads)))
    sys.stdout.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
