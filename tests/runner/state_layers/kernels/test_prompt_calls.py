"""The convolution of a batch of segments is that of each by torch, and so are the windows after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from piecegraph.runner.attention.interface.forward_context import ForwardContext, set_forward_context
from piecegraph.runner.attention.interface.kv_cache import StateCache
from piecegraph.runner.state_layers import prompt_kernels
from piecegraph.runner.state_layers.causal_conv import causal_conv
from piecegraph.runner.state_layers.libraries.segments import Segment, ragged_rows
from tests.compiled_for_gpu import compiled_for_gpu
from tests.interpreter import interpreted_case
from tests.runner.state_layers.kernels.test_calls import linear_attention, mamba_mixer, short_conv
from tests.runner.state_layers.libraries.test_library_calls import FLA, LENS, MAMBA, batch

CPU = torch.device("cpu")
SEGMENTS = [(3, 70), (70, 71), (80, 82), (82, 146), (150, 215)]
"""Rows of a step: over a chunk of 64 tokens, one token, fewer than a window, a chunk, one more; some belong to none."""


def check(
    *,
    channels: int = 70,
    kernel_size: int = 4,
    has_bias: bool = True,
    activation: str | None = "silu",
    dtype: torch.dtype = torch.float32,
    is_part: bool = False,
    segments: Sequence[tuple[int, int]] = SEGMENTS,
    parts: Sequence[int] = (),
    are_views: bool = False,
    is_spread: bool = False,
    device: torch.device = CPU,
) -> None:
    """`is_part`: the rows of `x` lie in wider ones; `are_views`: parts are those of one tensor; `is_spread`: numbers of
    weight and bias are apart.

    The reference computes in float32 on the CPU.
    """
    torch.manual_seed(0)
    x = torch.randn(220, channels + 20 * is_part).to(device, dtype)[:, 10 * is_part :][:, :channels]
    weight = torch.randn(channels, kernel_size).to(device, dtype)
    bias = torch.randn(channels).to(device, dtype) if has_bias else None
    if is_spread:
        weight = weight.t().contiguous().t()
        bias = None if bias is None else torch.stack([bias, bias], 1)[:, 0]
    windows = torch.randn(len(segments), channels, kernel_size - 1).to(device, dtype)
    before = windows.clone()
    rows = ragged_rows([Segment(start, end, -1, -1) for start, end in segments], device)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prompt_kernels, "runs_kernels", lambda x: True)
        convolve = prompt_kernels.convolution_of_rows(x, weight, bias, activation, parts)
    assert convolve is not None
    found, after = convolve(x, windows, rows)
    assert [each.shape[1] for each in found] == list(parts or (channels,))
    assert any(each.is_contiguous() for each in found if each.numel()) != are_views
    out = torch.cat(list(found), dim=1)
    assert torch.equal(windows, before) and out.dtype == after.dtype == dtype
    of_weight, of_bias = weight.cpu().float(), None if bias is None else bias.cpu().float()
    first = 0
    for number, (start, end) in enumerate(segments):
        inputs = x[None, start:end].cpu().float(), windows[number : number + 1].cpu().float()
        expected, window = causal_conv(*inputs, of_weight, of_bias, activation)
        torch.testing.assert_close(out[first : first + end - start].cpu(), expected[0].to(dtype))
        assert torch.equal(after[number].cpu(), window[0].to(dtype))
        first += end - start
    assert first == out.shape[0]


def check_op(op: str, make: Callable[[int], tuple[list[Any], list[Any]]], library_call: Any = None) -> None:
    """Results and blocks of a step are those without the kernel."""
    from piecegraph.runner.state_layers import ops  # noqa: F401  (registers the ops)

    found = []
    for runs_kernels in (False, True):
        library_calls = {"layer": library_call} if runs_kernels and library_call is not None else {}
        metadata = batch(LENS, library_calls, CPU, has_batches=runs_kernels)
        torch.manual_seed(0)
        arguments, tensors = make(metadata.num_tokens)
        at = {"linear_attention": 5, "mamba_mixer": 6, "short_conv": 4}[op]
        out = torch.zeros(arguments.pop(), dtype=arguments[0].dtype)
        caches = [torch.randn(len(LENS) * 4, *each.shape).to(each.dtype) for each in tensors]
        arguments.insert(at, out)
        context = ForwardContext(
            impl=None,  # type: ignore[arg-type]  # no attention runs
            metadata=metadata,
            kv_caches={},
            state_caches={"layer": StateCache(tuple(caches))},
        )
        with set_forward_context(context), pytest.MonkeyPatch.context() as patched:
            patched.setattr(prompt_kernels, "runs_kernels", lambda x, runs=runs_kernels: runs)
            getattr(torch.ops.piecegraph, op).default(*arguments, "layer")
        found.append([out, *caches])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


CASES: dict[str, Callable[[], None]] = {
    "segments": check,
    "bfloat16": partial(check, dtype=torch.bfloat16),
    "plain": partial(check, has_bias=False, activation=None),
    "rows that are parts": partial(check, is_part=True, channels=16),
    "window of one": partial(check, kernel_size=2, channels=3),
    "wide window": partial(check, kernel_size=6, segments=[(0, 2), (2, 66), (66, 133)]),
    "one short segment": partial(check, segments=[(7, 9)]),
    "a tensor for each part": partial(check, channels=160, parts=(64, 64, 32)),
    "parts of blocks of 16": partial(check, channels=112, parts=(48, 16, 48), dtype=torch.bfloat16),
    "views of parts": partial(check, channels=70, parts=(20, 20, 30), are_views=True),
    "a part of no channels": partial(check, channels=48, parts=(0, 16, 32), are_views=True),
    "numbers of weight and bias apart": partial(check, is_spread=True),
    "a window longer than a program": partial(check, kernel_size=20, channels=16),
    "two parts": partial(check, channels=64, parts=(32, 32), are_views=True),
    "short convolution": partial(check_op, "short_conv", partial(short_conv, activation="silu")),
    "gated delta net": partial(check_op, "linear_attention", linear_attention, FLA),
    "mamba-2": partial(check_op, "mamba_mixer", mamba_mixer, MAMBA),
    "a scan without a library": partial(check_op, "mamba_mixer", mamba_mixer),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_torch_segment_by_segment(name: str) -> None:
    interpreted_case(__name__, name)


def test_it_compiles_for_a_gpu() -> None:
    """At the size of Qwen3-Next, in bfloat16."""
    from piecegraph.runner.state_layers.kernels.prompt_calls import conv_prompt

    x, windows = torch.zeros(8, 8192, dtype=torch.bfloat16), torch.zeros(1, 8192, 3, dtype=torch.bfloat16)
    rows = ragged_rows([Segment(0, 8, -1, -1)], CPU)
    call = conv_prompt(x, x.new_zeros(8192, 4), None, windows, x.clone(), windows.clone(), rows, is_silu=True)
    assert compiled_for_gpu(call.kernel, call.arguments, call.options).asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torch_on_a_gpu(dtype: torch.dtype) -> None:
    check(dtype=dtype, channels=200, device=torch.device("cuda"))
