"""The option `selfcheck`: at start, the compiled model is compared with the traced one, and a failure names its cause.

There are two comparisons for every size that is captured: the compiled pieces with the traced graph, value by value
(`compiler/verify/piece_check.py`), and a replay with the pieces it was made of, bitwise. If the first fails, passes
are left out one by one until it succeeds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from piecegraph.compiler.api import compile as compile_module
from piecegraph.compiler.compiled_model import CompiledModel
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.verify.piece_check import RATIO, PieceCheckResult, ValueCheck, check_pieces
from piecegraph.config import PASSES, CompileConfig
from piecegraph.errors import ConfigError, SelfcheckFailed
from piecegraph.passes.pipeline import pipeline
from piecegraph.progress import OnPhase, Phase
from piecegraph.runner.attention.interface.op_call import call_of, position_bias
from piecegraph.runner.attention.triton.reference import rotated
from piecegraph.runner.engine.engine import Engine
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.inspect.replay_check import ReplayCheck, check_replays
from piecegraph.runner.inspect.trial_adapter import trial_adapter, trial_rows
from piecegraph.runner.models.causal_lm import DYNAMIC_DIMS, CausalLMForward, example_inputs

DEFAULT_SIZES = (1, 8)
"""The sizes that are checked if nothing is captured and no size is static."""

SEQUENCE = 256
"""Tokens of a synthetic sequence of the check; attention is computed densely over each sequence."""

ROWS = 64
"""The number of rows of all sets of inputs together, unless there are `MOST_SETS` sets: few rows prove little."""

MOST_SETS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfcheckReport:
    """The comparisons of a successful check; a failed one raises `SelfcheckFailed`."""

    values: tuple[ValueCheck, ...]
    unmatched: tuple[str, ...]  # values at cuts that passes made; compared only through the values computed from them
    replays: tuple[ReplayCheck, ...]
    seconds: float

    def __str__(self) -> str:
        sizes = len({row.size for row in self.values})
        differing = [row for row in self.values if row.compiled != row.eager]
        above = [row.ratio for row in differing if row.compiled > row.noise]
        worst = f"at most {max(above):.2f} x eager's" if above else "below their dtypes' noise"
        return (
            f"selfcheck: {len(self.values)} values at {sizes} sizes, {len(self.values) - len(differing)} with eager's "
            f"own error, of the others it is {worst}; {len(self.unmatched)} seen only in what follows from them; "
            f"{len(self.replays)} replays bitwise ({self.seconds:.1f} s)"
        )


class AttentionView:
    """Our attention ops for `piece_check`, which compares the rotated query and key, and the value."""

    def __init__(self, sequence: int) -> None:
        self._sequence = sequence

    def reads(self, op: str, args: Sequence[Any]) -> Mapping[str, torch.Tensor]:
        call = call_of(op, args)
        query, key = call.query, call.key
        if call.rotary is not None:
            query, key = rotated(query, key, call.rotary)
        return {"query": query, "key": key, "value": call.value}

    def run(self, op: str, args: Sequence[Any]) -> None:
        found = self.reads(op, args)
        call = call_of(op, args)
        out, window, softcap, sinks = call.out, call.window, call.softcap, call.sinks
        for first in range(0, out.shape[0], self._sequence):
            rows = slice(first, first + self._sequence)
            query, key, value = (found[name][rows].float().transpose(0, 1) for name in ("query", "key", "value"))
            group = query.shape[0] // key.shape[0]
            scores = query @ key.repeat_interleave(group, 0).mT * call.scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            length = torch.arange(scores.shape[-1], device=scores.device)
            if call.slopes is not None:
                scores = scores + position_bias(call.slopes, call.slope_scale, length).unsqueeze(1)
            behind = length[:, None] - length
            is_seen = (behind >= 0) & (behind < window) if window else behind >= 0
            if call.chunk_size:
                is_seen &= length[:, None] // call.chunk_size == length // call.chunk_size
            scores = scores.masked_fill(~is_seen, -math.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
            weights = scores.softmax(-1)[..., : length.shape[0]]
            out[rows] = (weights @ value.repeat_interleave(group, 0)).transpose(0, 1).to(out.dtype)

    def written(self, op: str, args: Sequence[Any]) -> torch.Tensor:
        return call_of(op, args).out


def selfcheck(
    model: CausalLMForward,
    compiled: CompiledModel,
    config: CompileConfig,
    *,
    runner: ModelRunner,
    engine: Engine,
    max_model_len: int,
    needs_host_batch: bool,
    on_phase: OnPhase | None = None,
) -> SelfcheckReport:
    """Compare `compiled`, made of `model` by `config`, with the traced graph, and its graphs' replays with it.

    Call this before the first request. Raises `ConfigError` for a model with states, and `SelfcheckFailed`; the model's
    weights may then have left the tensors they were merged into, and `compiled` must not be used.
    """
    if runner.step.state_caches:
        raise ConfigError(
            "selfcheck=True compares values with a reference, and there is none for layers with states "
            f"({next(iter(runner.step.state_caches))} is one). Leave selfcheck out."
        )
    started = time.monotonic()
    notify = on_phase or (lambda phase: None)
    check = _Check(model, config, runner, engine.vocab_size, min(SEQUENCE, max_model_len))
    sizes = _sizes(runner, compiled)
    values: list[ValueCheck] = []
    unmatched: dict[str, None] = {}
    with trial_adapter(runner.adapted), check.compiled("eager", ()) as traced:
        for number, size in enumerate(sizes):
            notify(Phase(name="selfcheck", done=number, total=len(sizes), detail=f"{size} tokens"))
            found = check.pieces(compiled, traced, size)
            first = next((row for row in found.values if not row.ok), None)
            if first is not None:
                raise SelfcheckFailed(f"{_described(first)} {check.culprit(traced, first, compiled)}")
            values += found.values
            unmatched |= dict.fromkeys(found.unmatched)
    with trial_adapter(runner.adapted):
        replays = check_replays(engine, runner, max_model_len=max_model_len, needs_host_batch=needs_host_batch)
    wrong = next((row for row in replays if not row.ok), None)
    if wrong is not None:
        raise SelfcheckFailed(
            f"the {wrong.mode} graph of {wrong.num_tokens} tokens computes other logits than the pieces it was made "
            f"of: they differ by up to {wrong.difference:.3g}, and should not at all. Run without it "
            f"(cudagraph_mode=NONE, or cudagraph_capture_sizes without {wrong.num_tokens}), and report it."
        )
    report = SelfcheckReport(
        values=tuple(values),
        unmatched=tuple(unmatched),
        replays=tuple(replays),
        seconds=time.monotonic() - started,
    )
    notify(Phase(name="selfcheck", done=len(sizes), total=len(sizes), seconds=report.seconds, detail=str(report)))
    return report


def _sizes(runner: ModelRunner, compiled: CompiledModel) -> tuple[int, ...]:
    captured = {
        descriptor.num_tokens
        for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
        for descriptor in runner.graphs.descriptors(mode)
    }
    return tuple(sorted(captured | set(compiled.report().static_sizes))) or DEFAULT_SIZES


def _described(row: ValueCheck) -> str:
    return (
        f"piece {row.piece} is the first that computes something else than the model, at {row.size} tokens: "
        f"{row.value} has an RMS error of {row.compiled:.3g} of its size, and eager has {row.eager:.3g} "
        f"(at most {RATIO:g} times that and {row.noise:.2g} are allowed)."
    )


class _Check:
    """One model under test, with synthetic inputs and other compilations of the model."""

    def __init__(
        self, model: CausalLMForward, config: CompileConfig, runner: ModelRunner, vocab_size: int, sequence: int
    ) -> None:
        self._model, self._device = model, runner.step.buffers.input_ids.device
        self._config = replace(config, selfcheck=False, expect={}, strict=False, dump_dir=None, compile_sizes=())
        self._num_logits = runner.step.num_logits
        # On a GPU their ops are kernels, which have no float64 for a reference.
        self._has_adapters = runner.adapted is not None and self._device.type == "cpu"
        self._vocab_size, self._sequence = vocab_size, sequence

    @contextmanager
    def compiled(self, compiler: str, passes: Sequence[Any]) -> Iterator[CompiledModel]:
        """Yield the model compiled by `compiler` with `passes`."""
        config = replace(self._config, compiler=compiler, passes=tuple(passes))
        with (
            torch.no_grad(),
            compile_module(
                self._model,
                config,
                dynamic_dims=DYNAMIC_DIMS,
                example_inputs=example_inputs(self._device),
            ) as made,
        ):
            yield made

    def pieces(self, compiled: CompiledModel, traced: CompiledModel, size: int) -> PieceCheckResult:
        sets = min(MOST_SETS, max(1, ROWS // size))
        inputs = [self._inputs(size, seed) for seed in range(sets)]
        with trial_rows(size, self._num_logits(size), self._device) if self._has_adapters else nullcontext():
            return check_pieces(compiled, traced, inputs, size, AttentionView(self._sequence))

    def culprit(self, traced: CompiledModel, row: ValueCheck, compiled: CompiledModel) -> str:
        """Return a sentence that names the cause: the last pass without which the error does not occur.

        The passes before it left a correct graph, though the error may depend on that graph.
        """
        passes = pipeline(self._config.passes, self._device.type)
        ran = compiled.report()
        compiler = "eager" if self._fails("eager", passes, traced, row.size) else ran.compiler
        if compiler != "eager" and self._fails(compiler, (), traced, row.size):
            return f"No pass is to blame: {compiler}'s code is wrong without any. compiler='eager' runs without it."
        for each in reversed(passes):
            if not self._fails(compiler, [other for other in passes if other is not each], traced, row.size):
                return f"Without the pass {each.name!r} it does not: leave that out (--passes -{each.name})."
        return "No single pass is to blame; passes=() runs without any."

    def _fails(self, compiler: str, passes: Sequence[Any], traced: CompiledModel, size: int) -> bool:
        _separate_weights(self._model)
        chosen = [each.name if each.name in PASSES else each for each in passes]
        with self.compiled(compiler, chosen) as variant:
            return any(not row.ok for row in self.pieces(variant, traced, size).values)

    def _inputs(self, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        input_ids = torch.randint(self._vocab_size, (size,), generator=generator)
        positions = torch.arange(size) % self._sequence
        if size < self._sequence:  # not always the first ones, of which rotary embedding changes nothing
            positions = positions + int(torch.randint(self._sequence - size + 1, (1,), generator=generator))
        indices = torch.arange(self._num_logits(size))
        return input_ids.to(self._device), positions.to(self._device), indices.to(self._device)


def _separate_weights(model: torch.nn.Module) -> None:
    """Give each parameter its own memory again, so that passes find the model as they did at first."""
    for parameter in model.parameters():
        if parameter.untyped_storage().nbytes() != parameter.numel() * parameter.element_size():
            parameter.data = parameter.data.clone()
