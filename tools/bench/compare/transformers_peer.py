"""Transformers' own model as a peer, greedy, with its cache.

The command is `python -m piecegraph.tools.bench.compare.transformers_peer`. Arguments are `{job}`, a dtype, and
`compile` for `torch.compile` of the forward over a static cache. Steps are a loop over the model's forward, without the
costs of `generate`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from piecegraph.tools.bench.compare.workload import Generate, PeerJob, job_of, measure_job


def generator(job: PeerJob, dtype: str, *, compiles: bool) -> tuple[Generate, int]:
    """Return the function that generates with the model of `job`, a folder or a .gguf file, and its vocabulary's size.

    `compiles`: each shape of a step compiles when it first comes, prompts and decodes alike.
    """
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

    path = Path(job.model)
    of_file = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = str(path.parent) if of_file else job.model
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **of_file).eval()
    forward = torch.compile(model, dynamic=False) if compiles else model

    def generate(prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        tokens = torch.tensor(prompts)
        cache = StaticCache(config=model.config, max_cache_len=job.longest) if compiles else DynamicCache()
        found, start = [], 0
        with torch.no_grad():
            for _ in range(num_tokens):
                positions = torch.arange(start, start + tokens.shape[1]).expand(tokens.shape[0], -1)
                start += tokens.shape[1]
                out = forward(
                    input_ids=tokens,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                tokens = out.logits[:, -1].argmax(-1, keepdim=True)
                found.append(tokens)
        answers: list[list[int]] = torch.cat(found, 1).tolist()
        return answers

    return generate, int(model.config.vocab_size)


def import_it() -> None:
    """Import what the model runs with."""
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401


def main(arguments: Sequence[str]) -> int:
    job, dtype, *rest = arguments
    compiles = rest == ["compile"]
    record = measure_job(
        job_of(job),
        "transformers, torch.compile" if compiles else "transformers",
        import_it,
        lambda: generator(job_of(job), dtype, compiles=compiles),
    )
    sys.stdout.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
