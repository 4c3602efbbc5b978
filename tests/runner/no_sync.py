"""Requests whose steps may not wait for the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.engine.engine import Engine


@contextmanager
def no_sync() -> Iterator[None]:
    """Raise for whatever makes torch wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_mixed_requests(engine: Engine, options: Sequence[Mapping[str, Any]], *, prompt_step: int) -> None:
    """Run a request with each of `options`, with an abort and an arrival in the middle, and wait for nothing.

    The prompt of each is `prompt_step` tokens longer than that of the one before it. All run twice: the first time
    warms up allocators, and kernels that no graph has run.
    """
    for round_ in range(2):
        for i, each in enumerate(options):
            params = SamplingParams(max_tokens=24, ignore_eos=True, **each)
            engine.add_request(f"{round_}-{i}", list(range(4, 8 + prompt_step * i)), params)
        steps = 0
        while engine.has_unfinished:
            if round_ == 0:
                engine.step()
                continue
            with no_sync():
                engine.step()
            steps += 1
            if steps == 5:
                engine.abort(f"{round_}-1")
                engine.add_request("late", [9] * 20, SamplingParams(max_tokens=5, temperature=0.0))
