"""Kernels of a step that no piece of the model has, compiled while the pieces are: those of attention, of the inputs
and of the sampler.

Triton compiles a kernel when it is first launched: without this, one after the other, in the profile run and in the
first capture.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from piecegraph.compiler.plan import SplitCall, TensorSpec
from piecegraph.progress import STEP_KERNELS, OnPhase, Phase
from piecegraph.runner import kernels as step_kernels
from piecegraph.runner.attention import kernels as attention_kernels
from piecegraph.runner.attention.op import launch_prepared
from piecegraph.runner.attention.op_call import ATTENTION_OPS, call_of
from piecegraph.runner.model_step import ModelStep
from piecegraph.runner.profile import prepare_step, rows_that_ask_for_everything, run_model
from piecegraph.runner.sampling import kernels as sampling_kernels

logger = logging.getLogger(__name__)

NUM_TOKENS = 16
"""Of the step: numbers that Triton tells from others (1, and multiples of 16) are as in larger ones."""


def compiles_kernels(device: torch.device) -> bool:
    """A step on `device` takes kernels of ours."""
    return device.type == "cuda"


class StepKernels:
    """A thread that launches them once. What fails there is logged, and fails again where it is needed."""

    def __init__(self, launch: Callable[[], None], device: torch.device) -> None:
        """`launch`: launches them all."""
        self._launch = launch
        self._device = device
        self._seconds: float | None = None  # that it took; None: it was never started
        self._thread = threading.Thread(target=self._run, name="piecegraph step kernels", daemon=True)

    def start(self) -> None:
        self._seconds = 0.0
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        """Until all are compiled, if that was started. Harmless to repeat."""
        if self._seconds is not None:
            self._thread.join()

    def tell(self, on_phase: OnPhase | None) -> None:
        """How long it took, once it is waited for."""
        if on_phase is not None and self._seconds is not None:
            what = "attention, inputs, sampler, beside the rest"
            on_phase(Phase(name=STEP_KERNELS, seconds=self._seconds, detail=what))

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            with _on(self._device):
                self._launch()
        except Exception:
            logger.warning("kernels of a step could not be compiled ahead", exc_info=True)
        self._seconds = time.perf_counter() - started


class AttentionAlone:
    """In a model's place in a step: one layer of each kind attends to nobody's tokens, and logits are zeros.

    Heads lie as they were projected, or as a merged projection has them; kernels are compiled for either alike.
    """

    def __init__(self, calls: Sequence[SplitCall], *, vocab_size: int, dtype: torch.dtype, max_num_reqs: int) -> None:
        """`calls`: of the model's graph; `dtype`: of its logits."""
        kinds = {(call.op, call.args[:-1]): call for call in calls if call.op in ATTENTION_OPS}
        self._calls = tuple(kinds.values())
        self._vocab_size = vocab_size
        self._dtype = dtype
        self._max_num_reqs = max_num_reqs

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """As `model_step.Forward`."""
        num_rows = input_ids.shape[0]
        if input_ids.is_cuda:  # the kernels of a graph are those for any batch of as many rows
            num_rows = max(num_rows, self._max_num_reqs)
        for call in self._calls:
            launch_prepared(call_of(call.op, [_made(each, num_rows) for each in call.args]))
        return self.logits(logits_indices.shape[0], input_ids.device)

    def logits(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """`[num_rows, vocab_size]`, zeros."""
        return torch.zeros(num_rows, self._vocab_size, dtype=self._dtype, device=device)


def _made(argument: Any, num_rows: int) -> Any:
    """A tensor for what is known of one, its symbolic size that of the batch."""
    if not isinstance(argument, TensorSpec):
        return argument
    shape = [size if isinstance(size, int) else num_rows for size in argument.shape]
    return torch.zeros(shape, dtype=argument.dtype, device=argument.device)


@torch.no_grad()
def launch_step_kernels(step: ModelStep, *, max_model_len: int, needs_host_batch: bool) -> None:
    """Run the parts of a step of a few tokens whose model is `AttentionAlone`, each in a thread, for each waits for one
    kernel after the other; and wait for them. It takes little of the GPU's memory and time: weights are loaded, and
    pieces may be measured, beside it. Raises what a part raises.

    Mutates the buffers and the states of `step`, which is nobody's.
    """
    num_tokens = min(NUM_TOKENS, step.buffers.max_num_reqs)
    device = step.buffers.input_ids.device
    if device.type == "cuda":
        _import_kernels()
    common = prepare_step(step, num_tokens=num_tokens, max_model_len=max_model_len, needs_host_batch=needs_host_batch)
    assert isinstance(step.forward, AttentionAlone), "a model would run with others of its kind at once"
    logits = step.forward.logits(step.num_logits(num_tokens), device)

    def sample() -> None:
        with rows_that_ask_for_everything(step, logits.shape[0], device) as batch:
            _side_by_side(step.sampler.parts(logits, batch), device)

    parts = (lambda: run_model(step, common), lambda: step.draw(logits), sample, lambda: _write_states(step))
    _side_by_side(parts, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _side_by_side(parts: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Each in a thread; all have ended, and the first failure is raised."""

    def run(part: Callable[[], object]) -> None:
        with torch.no_grad(), _on(device):
            part()

    with ThreadPoolExecutor(max_workers=len(parts)) as pool:
        for done in [pool.submit(run, part) for part in parts]:
            done.result()


def _write_states(step: ModelStep) -> None:
    """A request comes and goes."""
    states = step.states
    states.add("nobody", [0], [[0]] * step.buffers.num_groups)
    try:
        states.apply_writes()
    finally:
        states.remove("nobody")


def _import_kernels() -> None:
    """Threads that import what needs each other's modules could wait for each other."""
    for package in (attention_kernels, step_kernels, sampling_kernels):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """A thread begins with the first GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
