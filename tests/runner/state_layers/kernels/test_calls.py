"""A decode step's kernels leave what the torch path leaves, results, blocks and last states, in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from piecegraph import SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.attention.interface.cache_spec import CacheTensor
from piecegraph.runner.attention.interface.forward_context import ForwardContext, set_forward_context
from piecegraph.runner.attention.interface.kv_cache import StateCache
from piecegraph.runner.state_layers.metadata import StateMetadata, StatePlan, state_plan
from piecegraph.runner.state_layers.recent_states import DecodingRows
from tests.compiled_for_gpu import compiled_for_gpu
from tests.interpreter import interpreted, interpreted_case
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.speculative.drafting_llm import NGRAM
from tests.runner.test_graphs import load
from tests.runner.tiny_models import make_model, save

BLOCK_SIZE, PAGES, MAX_BLOCKS, NUM_ROWS = 4, 2, 4, 6

ONE_EACH = [(5, 1, 3), (0, 1, 1), (3, 1, 9), (8, 1, 9), (7, 1, 2), (0, 0, 0)]
"""Requests `(computed, tokens, prefill length)`: within a block, new, at its end, behind it, decoding, padding."""
THREE_EACH = [(5, 3, 3), (3, 3, 3), (0, 3, 9), (6, 3, 9), (7, 3, 2), (0, 0, 0)]
"""With 2 drafts: decoding, for the first time over a boundary, chunks of prompts, padding."""


def metadata(lens: Sequence[tuple[int, int, int]], num_places: int, *, is_dummy: bool) -> tuple[StateMetadata, int]:
    """The batch, whose blocks are in any order, and how many blocks there are."""
    counts = torch.tensor([0, *[count for _, count, _ in lens]], dtype=torch.int32)
    starts = counts.cumsum(0).int()
    num_tokens = int(starts[-1])
    torch.manual_seed(1)
    blocks = torch.randperm(len(lens) * MAX_BLOCKS).view(len(lens), MAX_BLOCKS)
    pages = (blocks.unsqueeze(-1) * PAGES + torch.arange(PAGES)).flatten(1).int()
    idx = torch.tensor([[5, 0, 3, 1, 4, 2][i] if count else -1 for i, (_, count, _) in enumerate(lens)])
    prefill_lens = torch.zeros(NUM_ROWS, dtype=torch.int32)
    for row, (_, _, length) in zip(idx.tolist(), lens, strict=True):
        if row >= 0:
            prefill_lens[row] = length
    slots = torch.full((num_tokens,), -1, dtype=torch.int64)
    if not is_dummy:
        slots[:] = 1
    made = StateMetadata(
        num_reqs=len(lens), num_tokens=num_tokens, max_query_len=max(c for _, c, _ in lens), num_decode_reqs=0,
        query_start_loc=starts, seq_lens=torch.tensor([a + b for a, b, _ in lens], dtype=torch.int32),
        block_table=pages, slot_mapping=slots, host=None, block_size=BLOCK_SIZE // PAGES, pages_per_block=PAGES,
        decoding=DecodingRows(num_places, idx.int(), prefill_lens) if num_places else None, planned=None,
    )  # fmt: skip
    return made, blocks.numel()


def check(
    op: str,
    make: Callable[[int], tuple[list[Any], list[CacheTensor]]],
    lens: Sequence[tuple[int, int, int]],
    num_places: int = 0,
    is_dummy: bool = False,
    num_leading: int = 0,
) -> None:
    """Blocks are parts of wider pages, as they are where layers share memory.

    `num_leading`: kernels run only the first requests, beside the torch path.
    """
    from piecegraph.runner.state_layers import decode_kernels, ops  # noqa: F401  (registers the ops)

    batch, num_blocks = metadata(lens, num_places, is_dummy=is_dummy)
    found = []
    for runs_kernels in (False, True):
        torch.manual_seed(0)
        arguments, tensors = make(batch.num_tokens)
        out = torch.zeros(arguments.pop(), dtype=arguments[0].dtype)
        caches = []
        for each in tensors:
            size = torch.Size(each.shape).numel()
            pages = torch.randn(num_blocks, size + 12).to(each.dtype)
            caches.append(pages[:, 4 : 4 + size].unflatten(1, each.shape))
        recent = tuple(torch.randn(NUM_ROWS * num_places, *each.shape).to(each.dtype) for each in tensors)
        context = ForwardContext(
            impl=None,  # type: ignore[arg-type]  # no attention runs
            metadata=batch,
            kv_caches={},
            state_caches={"layer": StateCache(tuple(caches))},
            recent_states={"layer": recent} if num_places else {},
        )
        at = {"linear_attention": 5, "mamba_mixer": 6, "short_conv": 4}[op]
        arguments.insert(at, out)
        if num_leading and runs_kernels:
            plan = planned(batch, num_leading)
            context = replace(context, metadata=replace(batch, planned=plan, num_kernel_decodes=num_leading))
        with set_forward_context(context), pytest.MonkeyPatch.context() as patched:
            patched.setattr(decode_kernels, "runs_kernels", lambda *_, runs=runs_kernels: runs and not num_leading)
            getattr(torch.ops.piecegraph, op).default(*arguments, "layer")
        found.append([out, *caches, *recent])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def planned(batch: StateMetadata, first_request: int) -> StatePlan:
    return state_plan(
        query_start_loc=batch.query_start_loc.tolist(), seq_lens=batch.seq_lens.tolist(),
        block_table=batch.block_table, slot_mapping=batch.slot_mapping, block_size=batch.block_size,
        pages_per_block=batch.pages_per_block, device=torch.device("cpu"), decoding=batch.decoding,
        first_request=first_request,
    )  # fmt: skip


def linear_attention(
    num_tokens: int, *, heads: int = 4, k_heads: int = 2, key: int = 8, value: int = 12, size: int = 4,
    by_channel: bool = False, dtype: torch.dtype = torch.float32,
) -> tuple[list[Any], list[CacheTensor]]:  # fmt: skip
    channels = 2 * k_heads * key + heads * value
    decay = -torch.rand(num_tokens, heads, *([key] if by_channel else []))
    arguments = [
        torch.randn(num_tokens, channels).to(dtype), decay, torch.rand(num_tokens, heads).to(dtype),
        torch.randn(channels, size).to(dtype), None, k_heads, key, key**-0.5, (num_tokens, heads, value),
    ]  # fmt: skip
    states = [CacheTensor(name="conv", shape=(channels, size - 1), dtype=dtype)]
    return arguments, [*states, CacheTensor(name="state", shape=(heads, key, value), dtype=torch.float32)]


def mamba_mixer(
    num_tokens: int, *, heads: int = 4, dim: int = 8, groups: int = 2, size: int = 8, kernel: int = 4,
    is_mamba1: bool = False, dtype: torch.dtype = torch.float32,
) -> tuple[list[Any], list[CacheTensor]]:  # fmt: skip
    channels = heads * dim + 2 * groups * size
    a = -torch.rand(heads, size) if is_mamba1 else -torch.rand(heads)
    weight, bias = (None, None)
    if not is_mamba1:
        weight, bias = torch.randn(channels, kernel).to(dtype), torch.randn(channels).to(dtype)
    arguments = [
        torch.randn(num_tokens, channels).to(dtype), torch.rand(num_tokens, heads), a, torch.randn(heads), weight, bias,
        groups, size, (num_tokens, heads, dim),
    ]  # fmt: skip
    states = [] if weight is None else [CacheTensor(name="conv", shape=(channels, kernel - 1), dtype=dtype)]
    return arguments, [*states, CacheTensor(name="state", shape=(heads, dim, size), dtype=torch.float32)]


def short_conv(
    num_tokens: int, *, channels: int = 20, kernel: int = 3, activation: str | None = None
) -> tuple[list[Any], list[CacheTensor]]:
    arguments = [
        torch.randn(num_tokens, channels), torch.randn(channels, kernel), torch.randn(channels), activation,
        (num_tokens, channels),
    ]  # fmt: skip
    return arguments, [CacheTensor(name="conv", shape=(channels, kernel - 1), dtype=torch.float32)]


AMONG_PROMPTS = [(5, 1, 3), (0, 1, 1), (3, 1, 9), (8, 1, 2), (6, 7, 9), (0, 5, 9)]
"""Four requests with one token each, then chunks of prompts."""

LINEAR: Any = partial(check, "linear_attention")
MIXER: Any = partial(check, "mamba_mixer")
CONV: Any = partial(check, "short_conv")
CASES: dict[str, Callable[[], None]] = {
    "gated delta net": partial(LINEAR, linear_attention, ONE_EACH),
    "gated delta net with drafts": partial(LINEAR, linear_attention, THREE_EACH, num_places=3),
    "decay by channel, one head": partial(
        LINEAR, partial(linear_attention, heads=1, k_heads=1, by_channel=True, value=5, key=6), ONE_EACH
    ),
    "one token each, with drafts": partial(LINEAR, linear_attention, ONE_EACH, num_places=3),
    "mamba-2": partial(MIXER, mamba_mixer, ONE_EACH),
    "mamba-2 with drafts": partial(MIXER, mamba_mixer, THREE_EACH, num_places=3),
    "mamba": partial(MIXER, partial(mamba_mixer, heads=20, dim=1, groups=1, is_mamba1=True), ONE_EACH),
    "mamba with drafts": partial(
        MIXER, partial(mamba_mixer, heads=20, dim=1, groups=1, size=6, is_mamba1=True), THREE_EACH, num_places=4
    ),
    "short convolution": partial(CONV, short_conv, ONE_EACH),
    "short convolution with drafts": partial(CONV, partial(short_conv, activation="silu"), THREE_EACH, num_places=3),
    "window of one": partial(CONV, partial(short_conv, kernel=2, channels=3), THREE_EACH, num_places=3),
    "wide window": partial(CONV, partial(short_conv, kernel=6), THREE_EACH, num_places=3),
    "gated delta net among prompts": partial(LINEAR, linear_attention, AMONG_PROMPTS, num_leading=4),
    "the same with drafts": partial(LINEAR, linear_attention, AMONG_PROMPTS, num_places=3, num_leading=4),
    "mamba-2 among prompts": partial(MIXER, mamba_mixer, AMONG_PROMPTS, num_leading=3),
    "short convolution among prompts": partial(CONV, short_conv, AMONG_PROMPTS, num_leading=4),
    "tokens without slots": partial(CONV, short_conv, ONE_EACH, is_dummy=True),
}


def check_a_model() -> None:
    """FULL graphs, recorded, over the kernels: greedy tokens of a hybrid with drafts are those of transformers."""
    from piecegraph.runner.state_layers import decode_kernels

    made: list[StateMetadata] = []

    def runs_kernels(metadata: StateMetadata, x: torch.Tensor) -> bool:
        if metadata.host is None and metadata.planned is None and metadata.max_query_len <= 3:
            made.append(metadata)
            return True
        return False

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(decode_kernels, "runs_kernels", runs_kernels)
        model = make_model("qwen3.5")
        speculative = {**NGRAM, "num_speculative_tokens": 2}
        sizes = {"max_num_seqs": 1, "cudagraph_capture_sizes": [3, 9], "max_num_batched_tokens": 9}
        with load(
            save(model, Path(folder)), block_size=4, num_kv_blocks=70, speculative_config=speculative, **sizes
        ) as llm:
            prompt = [5, 6, 7] * 3
            greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
            (output,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
            assert_same_tokens(model, prompt, output.outputs[0].token_ids)
            assert llm.runner.counters.by_mode()[CUDAGraphMode.FULL] > 0
    assert len(made) > 5


@pytest.mark.slow
def test_a_model_runs_by_the_kernels() -> None:
    interpreted(check_a_model)


FAST = (
    "gated delta net with drafts",
    "gated delta net among prompts",
    "short convolution among prompts",
    "mamba-2 with drafts",
    "mamba",
    "short convolution",
    "wide window",
)


@pytest.mark.parametrize("name", [*FAST, *[pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in FAST]])
def test_equals_the_torch_path(name: str) -> None:
    interpreted_case(__name__, name)


def step_rows(num_reqs: int, num_places: int, *, has_one_token: bool = False) -> Any:
    from piecegraph.runner.state_layers.kernels.calls import StepRows

    numbers = torch.zeros(num_reqs + 1, dtype=torch.int32)
    return StepRows(
        query_start_loc=numbers, seq_lens=numbers[:-1], block_table=torch.zeros(num_reqs, 64, dtype=torch.int32),
        slot_mapping=numbers.long(), idx_mapping=numbers[:-1] if num_places else None,
        prefill_lens=numbers if num_places else None, num_places=num_places, block_size=16, pages_per_block=1,
        has_one_token=has_one_token,
    )  # fmt: skip


@pytest.mark.parametrize("num_places", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_they_compile_for_a_gpu(num_places: int) -> None:
    """At the sizes of Qwen3-Next and of Granite 4, in bfloat16."""
    from piecegraph.runner.state_layers.kernels.calls import conv_step, delta_step, scan_step

    rows, bf16 = step_rows(8, num_places), torch.bfloat16

    def kept(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        places = torch.zeros(num_places, *shape, dtype=dtype) if num_places else None
        return torch.zeros(4, *shape, dtype=dtype), places

    x = torch.zeros(8, 8192, dtype=bf16)
    calls = [
        conv_step(
            x, torch.zeros(8192, 4, dtype=bf16), None, x.clone(), *kept(8192, 3, dtype=bf16),
            step_rows(8, num_places, has_one_token=True), is_silu=True,
        ),
        conv_step(x, torch.zeros(8192, 4, dtype=bf16), None, x.clone(), *kept(8192, 3, dtype=bf16), rows, is_silu=True),
        delta_step(
            x, torch.zeros(8, 32), x[:, :32], torch.zeros(8, 32, 128, dtype=bf16),
            *kept(32, 128, 128, dtype=torch.float32), rows, num_k_heads=16, scale=0.1, norm_eps=1e-6,
        ),
        scan_step(
            torch.zeros(8, 48 * 64 + 2 * 128, dtype=bf16), torch.zeros(8, 48), torch.zeros(48), torch.zeros(48),
            torch.zeros(8, 48, 64, dtype=bf16), *kept(48, 64, 128, dtype=torch.float32), rows, num_groups=1,
        ),
    ]  # fmt: skip
    for call in calls:
        compiled = compiled_for_gpu(call.kernel, call.arguments, call.options)
        assert compiled.asm["ptx"]


def test_one_row_of_a_projection_takes_the_kernel_of_several() -> None:
    """torch keeps the projection's stride for one row, of which none is a copy; kernels are compiled for strides."""
    from piecegraph.runner.state_layers.kernels.calls import conv_step

    strides = []
    for num_rows in (1, 8):
        x = torch.zeros(num_rows, 72)[:, 8:40].contiguous()
        kept, rows = torch.zeros(4, 32, 3), step_rows(num_rows, 0)
        call = conv_step(x, torch.zeros(32, 4), None, torch.empty_like(x), kept, None, rows, is_silu=True)
        strides.append({name: value for name, value in call.arguments.items() if name.endswith("_stride")})
    assert strides[0] == strides[1]
