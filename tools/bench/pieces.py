"""Measure each unique piece alone: microseconds per call, with the arguments of a decode step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.graphs.recording.recorder import make_recorder
from piecegraph.compiler.piece_compilers.protocol import RunPiece
from piecegraph.compiler.splitting.plan import PieceStep
from piecegraph.compiler.verify.walk import walk
from piecegraph.runner.llm import LLM
from piecegraph.tools.bench.decode_batch import DecodeBatch
from piecegraph.tools.bench.latency import time_steps

WARMUP_RUNS = 2
"""Runs before recording: a first launch, which loads or tunes a kernel, must not be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTime:
    """A unique piece at one batch size."""

    unique: int
    pieces: tuple[int, ...]  # of the model, that it runs
    batch_size: int
    us: float  # one call: the mean over these pieces, the median over runs

    @property
    def us_per_step(self) -> float:
        return self.us * len(self.pieces)


@dataclass(frozen=True, slots=True)
class _Call:
    run: RunPiece
    inputs: tuple[Any, ...]


def measure_pieces(llm: LLM, batch_size: int, *, context: int, runs: int) -> list[PieceTime]:
    """Time every unique piece of a decode step of `batch_size` requests, by itself.

    All layers that share a piece are called in a row, each with its own weights and inputs, inside one graph:
    called over and over with one layer's, a piece would find its weights in the GPU's cache.
    """
    with DecodeBatch(llm, batch_size, context, steps=1, prefill_tokens=0) as batch:
        calls = _calls(llm, batch)
    device = llm.runner.step.buffers.input_ids.device
    times = []
    for unique in sorted({step.unique for step in calls}):
        mine = {step.index: call for step, call in calls.items() if step.unique == unique}
        seconds = _seconds(list(mine.values()), device, runs)
        times.append(PieceTime(unique=unique, pieces=tuple(mine), batch_size=batch_size, us=1e6 * seconds / len(mine)))
    return times


def _calls(llm: LLM, batch: DecodeBatch) -> dict[PieceStep, _Call]:
    """Return the arguments of each piece in one step, which is run without graphs."""
    calls: dict[PieceStep, _Call] = {}

    def on_piece(step: PieceStep, run: RunPiece, inputs: tuple[Any, ...]) -> Sequence[Any]:
        calls[step] = _Call(run, inputs)
        return run(*inputs)

    def forward(*arguments: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = walk(llm.compiled.parts(arguments), on_piece)
        return logits

    runner = llm.runner
    compiled = runner.step
    runner.step = replace(compiled, forward=forward)
    try:
        batch.run_once(CUDAGraphMode.NONE)
    finally:
        runner.step = compiled
    return calls


def _seconds(calls: Sequence[_Call], device: torch.device, runs: int) -> float:
    def run_all() -> list[Any]:
        return [output for call in calls for output in call.run(*call.inputs)]

    recorder = make_recorder("auto", device)
    with torch.no_grad(), recorder.on_stream():
        for _ in range(WARMUP_RUNS):
            run_all()
        recording = recorder.record(run_all)
    try:
        replay: Callable[[], None] = recording.replay
        return statistics.median(time_steps(replay, runs, device))
    finally:
        recording.release()
