"""The ops of layers with states, at which a model's graph is split as it is at attention.

Each runs plain torch on any device: sequences one after the other, single tokens together. Where a library computes a
layer's sequences (`libraries`), it runs the parts of them that do not wait for each other in one call, and on a GPU so
does a kernel their convolution (`prompt_kernels`); other kernels run single tokens there (`decode_kernels`). They are
defined through `torch.library.Library` and called as `.default`, like attention (`runner/attention/interface/op.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from piecegraph.compiler.graphs.replay.prepared_ops import register_prepare
from piecegraph.runner.attention.interface.forward_context import get_forward_context
from piecegraph.runner.state_layers import decode_kernels
from piecegraph.runner.state_layers.calls import (
    LINEAR_ATTENTION_OP,
    LINEAR_ATTENTION_SCHEMA,
    MAMBA_MIXER_OP,
    MAMBA_MIXER_SCHEMA,
    SHORT_CONV_OP,
    SHORT_CONV_SCHEMA,
)
from piecegraph.runner.state_layers.causal_conv import causal_conv
from piecegraph.runner.state_layers.decode_kernels import DecodeLayer
from piecegraph.runner.state_layers.delta_rule import gated_delta_rule
from piecegraph.runner.state_layers.libraries.library_calls import FlashLinearAttention, LibraryCall, MambaSsm
from piecegraph.runner.state_layers.libraries.segments import RaggedRows
from piecegraph.runner.state_layers.metadata import NO_STATE, StateMetadata, StateRound, StateSequence
from piecegraph.runner.state_layers.prompt_kernels import ConvolveRows, convolution_of_rows
from piecegraph.runner.state_layers.selective_scan import selective_scan

States = Sequence[torch.Tensor]

Convolve = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function from `[batch, num_tokens, channels]` and the windows before them to their convolution, and the windows
after them."""

Recur = Callable[[Sequence[torch.Tensor], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function from inputs `[batch, num_tokens, ...]` and the states before them to the result of their batch and tokens,
and the states after them, `[batch, ...]`."""

RaggedRecur = Callable[[Sequence[torch.Tensor], torch.Tensor, RaggedRows], tuple[torch.Tensor, torch.Tensor]]
"""The same for segments one after the other: inputs and result are `[1, num_rows, ...]`."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The computation of a layer: a convolution of its first input, a recurrence over all of them, or both."""

    convolve: Convolve | None
    recur: Recur | None
    ragged: RaggedRecur | None = None  # by a library; None: there is none, or no recurrence
    convolve_rows: ConvolveRows | None = None  # of segments by a kernel; None: by `convolve`, one after the other
    parts: Sequence[int] = ()  # the channels of each input that `ragged` takes in place of the first; empty: one input

    @property
    def runs_segments(self) -> bool:
        """True if segments of prompts run in batches, by `over_segments`."""
        return self.convolve_rows is not None if self.recur is None else self.ragged is not None

    def __call__(self, inputs: Sequence[torch.Tensor], states: States) -> tuple[torch.Tensor, States]:
        """Return the result for inputs `[batch, num_tokens, ...]` and the states `[batch, ...]` before them, and the
        states after them."""
        first, *others = inputs
        if self.convolve is None:
            assert self.recur is not None
            result, state = self.recur(inputs, states[0])
            return result, (state,)
        first, window = self.convolve(first, states[0])
        if self.recur is None:
            return first, (window,)
        result, state = self.recur((first, *others), states[1])
        return result, (window, state)

    def over_segments(
        self, inputs: Sequence[torch.Tensor], states: States, rows: RaggedRows
    ) -> tuple[torch.Tensor, States]:
        """Return the result `[num_rows, ...]` for the segments' rows of inputs `[num_tokens, ...]`, and their states.

        The recurrence runs for all segments in one call, and so does the convolution where it is a kernel.
        """
        first, *others = inputs
        windows: States = ()
        convolved: Sequence[torch.Tensor]
        if self.convolve is None:
            convolved = (rows.of(first),)
        else:
            convolved, window = self._convolve_segments(first, states[0], rows)
            windows = (window,)
        if self.recur is None:
            return convolved[0], windows
        assert self.ragged is not None
        picked = [each.unsqueeze(0) for each in (*convolved, *map(rows.of, others))]
        result, state = self.ragged(picked, states[len(windows)], rows)
        return result[0], (*windows, state)

    def _convolve_segments(
        self, x: torch.Tensor, windows: torch.Tensor, rows: RaggedRows
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        if self.convolve_rows is not None:
            return self.convolve_rows(x, windows, rows)
        assert self.convolve is not None
        found = [
            self.convolve(x[start:end].unsqueeze(0), windows[number : number + 1])
            for number, (start, end) in enumerate(rows.ranges)
        ]
        out = torch.cat([each[0] for each, _ in found])
        convolved = out.split(list(self.parts), dim=1) if self.parts else (out,)
        return convolved, torch.cat([window for _, window in found])


def run_layer(inputs: Sequence[torch.Tensor], out: torch.Tensor, layer: str, scan: Scan) -> None:
    """Run a layer over the rows of a step's batch: write `out`, and the states that the step's plan keeps.

    `inputs` and `out` are `[num_tokens, ...]`. Rows of padding in `out` become zero.
    """
    context = get_forward_context()
    metadata, cache = context.metadata_of(layer), context.state_caches[layer].tensors
    assert isinstance(metadata, StateMetadata), type(metadata)
    plan = metadata.plan()
    if scan.runs_segments and plan.batches:
        for batch in plan.batches:
            result, states = scan.over_segments(inputs, batch.blocks.load(cache), batch.ragged)
            batch.ragged.write(out, result.to(out.dtype))
            batch.blocks.store(cache, states)
    else:
        _run_sequences(plan.sequences, inputs, out, scan, cache)
    decodes = plan.decodes
    if decodes is not None:
        states = decodes.blocks.load(cache)
        result, states = scan([each[decodes.rows].unsqueeze(1) for each in inputs], states)
        out[decodes.rows] = result[:, 0].to(out.dtype)
        decodes.blocks.store(cache, states)
    recent = context.recent_states.get(layer, ())
    for each in plan.rounds:
        _run_round(each, inputs, out, scan, cache, recent)
    out[plan.num_rows :].zero_()


def _run_sequences(
    sequences: Sequence[StateSequence], inputs: Sequence[torch.Tensor], out: torch.Tensor, scan: Scan, cache: States
) -> None:
    """Run the requests with several tokens, one after the other."""
    for sequence in sequences:
        states: States = [
            kept.new_zeros((1, *kept.shape[1:])) if sequence.read == NO_STATE else kept[sequence.read].unsqueeze(0)
            for kept in cache
        ]
        first = sequence.start
        for end, write in sequence.segments:
            result, states = scan([each[first:end].unsqueeze(0) for each in inputs], states)
            out[first:end] = result[0].to(out.dtype)
            if write != NO_STATE:
                for kept, state in zip(cache, states, strict=True):
                    kept[write] = state[0].to(kept.dtype)
            first = end


def _run_round(
    plan: StateRound, inputs: Sequence[torch.Tensor], out: torch.Tensor, scan: Scan, cache: States, recent: States
) -> None:
    """Run one token of each request of a round."""
    states = [kept[plan.reads] for kept in recent]
    if plan.is_in_block is not None:
        in_block = [plan.is_in_block.view(-1, *[1] * (state.dim() - 1)) for state in states]
        states = [
            torch.where(mask, kept[plan.blocks], state)
            for mask, kept, state in zip(in_block, cache, states, strict=True)
        ]
    result, after = scan([each[plan.rows].unsqueeze(1) for each in inputs], states)
    out[plan.rows] = result[:, 0].to(out.dtype)
    for last, kept, state in zip(recent, cache, after, strict=True):
        last[plan.writes] = state.to(last.dtype)
        if plan.at_boundary is not None:
            kept[plan.boundaries] = state[plan.at_boundary].to(kept.dtype)


def _linear_attention(
    mixed: torch.Tensor,  # [num_tokens, channels]: query, key and value, before their convolution
    decay: torch.Tensor,  # [num_tokens, num_v_heads] or [num_tokens, num_v_heads, head_k_dim] float32
    beta: torch.Tensor,  # [num_tokens, num_v_heads]
    conv_weight: torch.Tensor,  # [channels, kernel_size]
    conv_bias: torch.Tensor | None,
    out: torch.Tensor,  # [num_tokens, num_v_heads, head_v_dim]
    num_k_heads: int,
    head_k_dim: int,
    scale: float,
    layer: str,
) -> None:
    def by_kernels(found: DecodeLayer) -> None:
        x = decode_kernels.convolved(found.part(mixed), conv_weight, conv_bias, "silu", found)
        inputs = (found.part(decay), found.part(beta), found.part(out))
        decode_kernels.attend_linearly(x, *inputs, found, num_k_heads=num_k_heads, scale=scale)

    if _ran(by_kernels, decode_kernels.decode_layer(layer, mixed)):
        return
    num_v_heads, head_v_dim = out.shape[1:]
    key_size = num_k_heads * head_k_dim
    parts = (key_size, key_size, num_v_heads * head_v_dim)

    def by_heads(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key = (each.unflatten(-1, (num_k_heads, head_k_dim)) for each in (query, key))
        return query, key, value.unflatten(-1, (num_v_heads, head_v_dim))

    def recur(inputs: Sequence[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, decay, beta = inputs
        query, key, value = by_heads(*x.split(parts, dim=-1))
        if num_v_heads > num_k_heads:
            query, key = (each.repeat_interleave(num_v_heads // num_k_heads, dim=2) for each in (query, key))
        return gated_delta_rule(query, key, value, decay, beta, state, scale)

    def ragged(
        inputs: Sequence[torch.Tensor], states: torch.Tensor, rows: RaggedRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        *convolved, decay, beta = inputs
        assert isinstance(library_call, FlashLinearAttention)
        return library_call.gated_delta_rule(*by_heads(*convolved), decay, beta, states, scale, rows)

    library_call = _library_call(layer)
    convolve = partial(causal_conv, weight=conv_weight, bias=conv_bias, activation="silu")
    rows = convolution_of_rows(mixed, conv_weight, conv_bias, "silu", parts)
    by_library = None if library_call is None else ragged
    run_layer((mixed, decay, beta), out, layer, Scan(convolve, recur, by_library, rows, parts))
    _ran(by_kernels, decode_kernels.leading_decodes(layer))


def _mamba_mixer(
    mixed: torch.Tensor,  # [num_tokens, channels]: x, B and C, before their convolution if there is a `conv_weight`
    dt: torch.Tensor,  # [num_tokens, num_heads]
    A: torch.Tensor,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
    conv_weight: torch.Tensor | None,  # [channels, kernel_size]
    conv_bias: torch.Tensor | None,
    out: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    num_groups: int,
    state_size: int,
    layer: str,
) -> None:
    def by_kernels(found: DecodeLayer) -> None:
        x = found.part(mixed)
        if conv_weight is not None:
            x = decode_kernels.convolved(x, conv_weight, conv_bias, "silu", found)
        number = int(conv_weight is not None)
        outs = found.part(out)
        decode_kernels.scan_into(outs, x, found.part(dt), A, D, found, num_groups=num_groups, number=number)

    if _ran(by_kernels, decode_kernels.decode_layer(layer, mixed)):
        return
    num_heads, head_dim = out.shape[1:]
    group_size = num_groups * state_size

    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, B, C = x.split([num_heads * head_dim, group_size, group_size], dim=-1)  # noqa: N806
        B, C = (each.unflatten(-1, (num_groups, state_size)) for each in (B, C))  # noqa: N806
        return x.unflatten(-1, (num_heads, head_dim)), B, C

    def recur(inputs: Sequence[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, B, C = split(inputs[0])  # noqa: N806
        return selective_scan(x, inputs[1], A, B, C, D, state)

    def ragged(
        inputs: Sequence[torch.Tensor], states: torch.Tensor, rows: RaggedRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, B, C = split(inputs[0])  # noqa: N806
        assert isinstance(library_call, MambaSsm)
        return library_call.selective_scan(x, inputs[1], A, B, C, D, states, rows)

    library_call = _library_call(layer)
    convolve = rows = None
    if conv_weight is not None:
        convolve = partial(causal_conv, weight=conv_weight, bias=conv_bias, activation="silu")
        rows = convolution_of_rows(mixed, conv_weight, conv_bias, "silu")
    run_layer((mixed, dt), out, layer, Scan(convolve, recur, None if library_call is None else ragged, rows))
    _ran(by_kernels, decode_kernels.leading_decodes(layer))


def _short_conv(
    x: torch.Tensor,  # [num_tokens, channels]
    weight: torch.Tensor,  # [channels, kernel_size]
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,  # [num_tokens, channels]
    layer: str,
) -> None:
    def by_kernels(found: DecodeLayer) -> None:
        decode_kernels.convolve_into(found.part(out), found.part(x), weight, bias, activation, found)

    if _ran(by_kernels, decode_kernels.decode_layer(layer, x)):
        return
    convolve = partial(causal_conv, weight=weight, bias=bias, activation=activation)
    rows = convolution_of_rows(x, weight, bias, activation)
    run_layer((x,), out, layer, Scan(convolve, None, convolve_rows=rows))
    _ran(by_kernels, decode_kernels.leading_decodes(layer))


def _ran(by_kernels: Callable[[DecodeLayer], None], found: DecodeLayer | None) -> bool:
    """Run the requests of `found` by kernels, if there are any; return whether there were."""
    if found is None:
        return False
    by_kernels(found)
    return True


def _library_call(layer: str) -> LibraryCall | None:
    """Return the library that computes prompts of a layer in the current step, or None for torch."""
    metadata = get_forward_context().metadata_of(layer)
    assert isinstance(metadata, StateMetadata), type(metadata)
    return metadata.library_calls.get(layer)


_library = torch.library.Library("piecegraph", "FRAGMENT")


def _register(op: str, schema: str, run: Callable[..., None]) -> None:
    _library.define(schema)
    _library.impl(op.partition("::")[2], run, "CompositeExplicitAutograd")
    torch.library.register_fake(op, lambda *args: None, lib=_library)
    register_prepare(op, _why_not_prepared, lambda: None)


def _why_not_prepared(*args: Any) -> str:
    """Return why no call is prepared for replay."""
    return "the states of a step's requests are planned anew for each batch"


_register(LINEAR_ATTENTION_OP, LINEAR_ATTENTION_SCHEMA, _linear_attention)
_register(MAMBA_MIXER_OP, MAMBA_MIXER_SCHEMA, _mamba_mixer)
_register(SHORT_CONV_OP, SHORT_CONV_SCHEMA, _short_conv)
