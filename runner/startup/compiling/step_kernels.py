"""Compilation of a step's kernels for layers, input preparation and sampling, while the model's pieces compile.

Triton compiles a kernel at its first launch. Without this module the kernels would be compiled one after the other,
in the profile run and in the first capture.
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
from dataclasses import replace
from typing import Any

import torch

from piecegraph.compiler.splitting.plan import SplitCall, TensorSpec
from piecegraph.progress import STEP_KERNELS, OnPhase, Phase
from piecegraph.runner.attention.interface.forward_context import set_forward_context
from piecegraph.runner.attention.interface.op import launch_prepared
from piecegraph.runner.attention.interface.op_call import ATTENTION_OPS, call_of
from piecegraph.runner.attention.interface.step_metadata import StepMetadata
from piecegraph.runner.attention.triton import kernels as attention_kernels
from piecegraph.runner.device_memory import kernels as memory_kernels
from piecegraph.runner.sampling import kernels as sampling_kernels
from piecegraph.runner.startup.compiling.profile import prepare_step, rows_with_all_options, run_model
from piecegraph.runner.state_layers import kernels as state_kernels
from piecegraph.runner.state_layers.calls import STATE_OPS
from piecegraph.runner.state_layers.metadata import StateMetadata
from piecegraph.runner.step import kernels as step_kernels
from piecegraph.runner.step.model_step import ModelStep

logger = logging.getLogger(__name__)

NUM_TOKENS = 16
"""The number of tokens in the step: Triton specialises it (1, or a multiple of 16) as it does for larger steps."""


def compiles_kernels(device: torch.device) -> bool:
    """Return whether a step on `device` launches Triton kernels."""
    return device.type == "cuda"


class StepKernels:
    """A thread that launches the kernels of a step once.

    A failure is logged, and raised again by the step that first needs the kernel.
    """

    def __init__(self, launch: Callable[[], None], device: torch.device) -> None:
        """Make the thread without starting it; `launch` launches all kernels."""
        self._launch = launch
        self._device = device
        self._seconds: float | None = None  # the duration; None: never started
        self._thread = threading.Thread(target=self._run, name="piecegraph step kernels", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._seconds = 0.0
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until all kernels are compiled, if the thread was started. Idempotent."""
        if self._seconds is not None:
            self._thread.join()

    def report(self, on_phase: OnPhase | None) -> None:
        """Report the duration as a phase, after `wait`."""
        if on_phase is not None and self._seconds is not None:
            detail = "attention, inputs, sampler, beside the rest"
            on_phase(Phase(name=STEP_KERNELS, seconds=self._seconds, detail=detail))

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            with _on(self._device):
                self._launch()
        except Exception:
            logger.warning("kernels of a step could not be compiled ahead", exc_info=True)
        self._seconds = time.perf_counter() - started


class SplitOpsModel:
    """A stand-in for the model in a step: one layer of each kind, with attention or a state, runs on dummy tokens.

    Logits are zeros.

    The memory layout of the heads may differ from the model's (separate or merged projections); the compiled kernels
    are the same for both.
    """

    def __init__(self, calls: Sequence[SplitCall], *, vocab_size: int, dtype: torch.dtype, max_num_reqs: int) -> None:
        """Keep one call of each kind of layer.

        `calls`: the split calls of the model's graph. `dtype`: the dtype of the logits.
        """
        kinds = {(call.op, call.args[:-1]): call for call in calls if call.op in (*ATTENTION_OPS, *STATE_OPS)}
        self._calls = tuple(kinds.values())
        self.layers = frozenset(call.args[-1] for call in self._calls)
        """The names of the layers that run."""
        self._vocab_size = vocab_size
        self._dtype = dtype
        self._max_num_reqs = max_num_reqs

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """Run the layers and return zero logits; the signature is `model_step.Forward`."""
        self.run_states(input_ids)
        for call in self._calls:
            if call.op not in STATE_OPS:
                launch_prepared(call_of(call.op, self._arguments(call, input_ids)))
        return self.logits(logits_indices.shape[0], input_ids.device)

    def run_states(self, input_ids: torch.Tensor) -> None:
        """Run the layers with a state on the batch of the current forward context."""
        for call in self._calls:
            if call.op in STATE_OPS:
                namespace, _, name = call.op.partition("::")
                getattr(getattr(torch.ops, namespace), name).default(*self._arguments(call, input_ids))

    def _arguments(self, call: SplitCall, input_ids: torch.Tensor) -> list[Any]:
        """Return the arguments of a call over zeros."""
        num_rows = input_ids.shape[0]
        if input_ids.is_cuda:  # a graph's kernels serve every batch of up to as many rows
            num_rows = max(num_rows, self._max_num_reqs)
        return [_as_tensor(each, num_rows) for each in call.args]

    def logits(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """Return zeros `[num_rows, vocab_size]`."""
        return torch.zeros(num_rows, self._vocab_size, dtype=self._dtype, device=device)


def _as_tensor(argument: Any, num_rows: int) -> Any:
    """Return zeros for a `TensorSpec`, with `num_rows` for a symbolic size; return anything else unchanged."""
    if not isinstance(argument, TensorSpec):
        return argument
    shape = [size if isinstance(size, int) else num_rows for size in argument.shape]
    return torch.zeros(shape, dtype=argument.dtype, device=argument.device)


@torch.no_grad()
def launch_step_kernels(step: ModelStep, *, max_model_len: int, needs_host_batch: bool) -> None:
    """Run the parts of a step of a few tokens whose model is a `SplitOpsModel`, and wait for them.

    Each part runs in a thread of its own, because it waits for its kernels to be compiled one after the other. The
    parts use little of the GPU's memory and time, since weights are loaded meanwhile. Raises what a part raises.
    Layers with states run as they do in a batch that the host has planned and, where it does (`needs_host_batch`), also
    as they do in a graph, with other kernels.

    Mutates the buffers and the states of `step`, which must be a temporary one.
    """
    num_tokens = min(NUM_TOKENS, step.buffers.max_num_reqs)
    device = step.buffers.input_ids.device
    if device.type == "cuda":
        _import_kernels(has_states=bool(step.state_caches))
    common = prepare_step(step, num_tokens=num_tokens, max_model_len=max_model_len, needs_host_batch=needs_host_batch)
    model = step.forward
    assert isinstance(model, SplitOpsModel), "the parts run concurrently, which a real model does not allow"
    logits = model.logits(step.num_logits(num_tokens), device)
    in_graph = _as_in_graph(step.metadata_builder.build(common))

    def sample() -> None:
        with rows_with_all_options(step, logits.shape[0], device) as batch:
            _run_in_threads(step.sampler.parts(logits, batch), device)

    def run_states() -> None:
        with set_forward_context(step.context(in_graph)):
            model.run_states(step.buffers.input_ids[:num_tokens])

    parts = [lambda: run_model(step, common), lambda: step.draw(logits), sample, lambda: _write_states(step)]
    if step.state_caches and needs_host_batch:
        parts.append(run_states)
    _run_in_threads(parts, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _run_in_threads(parts: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Run each part in a thread, wait for all of them, and raise the first failure."""

    def run(part: Callable[[], object]) -> None:
        with torch.no_grad(), _on(device):
            part()

    with ThreadPoolExecutor(max_workers=len(parts)) as pool:
        for done in [pool.submit(run, part) for part in parts]:
            done.result()


def _as_in_graph(metadata: StepMetadata) -> StepMetadata:
    """Return metadata with which layers with states read the batch on the device, as they do in a graph."""
    groups = [
        replace(group, host=None, planned=None) if isinstance(group, StateMetadata) else group
        for group in metadata.groups
    ]
    return StepMetadata(tuple(groups))


def _write_states(step: ModelStep) -> None:
    """Add and remove a request, which launches the kernel of staged writes."""
    states = step.states
    states.add("dummy", [0], [[0]] * step.buffers.num_groups)
    try:
        states.apply_writes()
    finally:
        states.remove("dummy")


def _import_kernels(*, has_states: bool) -> None:
    """Import all kernel modules, since concurrent imports of dependent modules could deadlock the threads."""
    packages = [attention_kernels, step_kernels, sampling_kernels, memory_kernels]
    if has_states:
        packages.append(state_kernels)
    for package in packages:
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `device` is current, because a new thread starts with the first GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
