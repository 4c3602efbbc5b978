"""The SDPA backend is what every other backend is compared to, so it is compared to arithmetic written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from piecegraph.runner.attention.interface.backend import AttentionBackend
from piecegraph.runner.attention.kernels import decode_attention, norm_and_rotate
from piecegraph.runner.attention.sdpa import SdpaBackend, _by_slot, _read, _run_of, attend_one_query
from piecegraph.runner.attention.triton.backend import TritonBackend
from tests.cpp_kernels import needs_cpp_compiler, use_kernel
from tests.runner.attention.paged_case import PagedCase, by_value_factor, make_case
from tests.runner.attention.rotary_case import NORMS, check_rotated_cache, make_rotary_case

BATCHES = {
    "one decode": [(9, 1)],
    "decodes": [(9, 1), (3, 1), (21, 1), (0, 1)],
    "one prefill": [(0, 11)],
    "prefills": [(0, 11), (0, 4), (0, 1)],
    "chunks": [(5, 6), (8, 8)],
    "mixed": [(9, 1), (30, 1), (0, 13), (7, 5), (4, 1), (0, 1)],
}

KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "blocks in order": {"is_in_order": True},
    "one kv head": {"num_kv_heads": 1},
    "no groups": {"num_kv_heads": 4},
    "window 1": {"window": 1},
    "window": {"window": 5},
    "window of a block": {"window": 4},
    "wide window": {"window": 100},
    "chunks": {"chunk_size": 5},
    "chunks of 1": {"chunk_size": 1},
    "chunks of a block": {"chunk_size": 4},
    "softcap": {"softcap": 1.5},
    "sinks": {"has_sinks": True},
    "bias by position": {"slopes_dtype": torch.float32},
    "rounded bias": {"slopes_dtype": torch.bfloat16, "num_kv_heads": 1},
    "bias and window": {"slopes_dtype": torch.float32, "window": 5, "softcap": 2.0},
    "all at once": {"window": 5, "softcap": 2.0, "has_sinks": True, "value_dim": 6},
    "narrow values": {"value_dim": 5},
    "wide values": {"value_dim": 12, "window": 6},
    "odd block": {"block_size": 3},
}


def run(case: PagedCase, backend: AttentionBackend | None = None) -> torch.Tensor:
    backend, device = backend or SdpaBackend(), torch.device("cpu")
    block_size = case.kv_cache.key.shape[1]
    builder = backend.metadata_builder([case.layer], block_size, device, max_num_reqs=8)
    call = case.call()
    backend.impl().forward(call, case.kv_cache, builder.build(case.metadata))
    return call.out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_naive_attention(batch: str, kind: str) -> None:
    """Any mix of decodes, prefills and chunks, of any kind of attention, over shuffled blocks; the cache
    holds NaN wherever nothing was written, and block tables end in numbers outside of it.
    """
    case = make_case(lens=BATCHES[batch], **KINDS[kind])  # type: ignore[arg-type]
    torch.testing.assert_close(run(case).double(), case.expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "no groups", "window", "wide window", "chunks", "softcap", "wide values"])
@pytest.mark.parametrize("lens", [(0, 300), (45, 257)], ids=["prompt", "chunk"])
def test_many_queries_are_computed_in_blocks(lens: tuple[int, int], kind: str) -> None:
    """Blocks of queries, the last one short, see the keys that they see in one call."""
    case = make_case(lens=[(9, 1), lens, (3, 1)], **KINDS[kind])  # type: ignore[arg-type]
    torch.testing.assert_close(run(case).double(), case.expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "all at once"])
@pytest.mark.parametrize("backend", [SdpaBackend(), TritonBackend()])
def test_numbers_of_e4m3_have_the_factor_of_their_head(backend: AttentionBackend, kind: str) -> None:
    """Values of the first head are beyond the range of e4m3; the other backend runs its kernels' reference."""
    case = make_case(
        lens=BATCHES["mixed"], is_e4m3=True, scales=([0.25, 3.0], [700.0, 0.125]), **KINDS[kind]  # type: ignore[arg-type]
    )  # fmt: skip
    found = by_value_factor(case, run(case, backend))
    torch.testing.assert_close(found, by_value_factor(case, case.expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "window", "no groups"])
@pytest.mark.parametrize("backend", [SdpaBackend(), TritonBackend()])
def test_a_constant_that_is_subtracted_from_all_keys_of_a_head_changes_nothing(
    backend: AttentionBackend, kind: str
) -> None:
    """Only what writes the cache knows of it (Note [keys less a constant])."""
    scales = ([0.25, 4.0], [0.5, 2.0]) if kind != "no groups" else ([0.25] * 4, [2.0] * 4)
    case = make_case(lens=BATCHES["mixed"], is_e4m3=True, scales=scales, is_shifted=True, **KINDS[kind])  # type: ignore[arg-type]
    assert case.kv_cache.scales is not None and case.kv_cache.scales.key_shift is not None
    torch.testing.assert_close(run(case, backend).double(), case.expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("computed_by", ["torch", pytest.param("our kernel", marks=needs_cpp_compiler)])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("batch", BATCHES)
def test_query_and_key_are_rotated_on_the_way(
    batch: str, norm: str, computed_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernel rotates the query in its place, which the op allows."""
    monkeypatch.setattr(norm_and_rotate.KERNEL, "call", None)
    if computed_by == "our kernel":
        use_kernel(norm_and_rotate.KERNEL, monkeypatch)
    case = make_rotary_case(lens=BATCHES[batch], num_padded=2, norm=norm, rotary_dim=6)
    raw, backend = case.raw, SdpaBackend()
    before = raw.query.clone()
    out = torch.empty_like(raw.query)
    builder = backend.metadata_builder([raw.layer], raw.kv_cache.key.shape[1], raw.query.device, max_num_reqs=8)
    backend.impl().forward(raw.call(out, case.rotary), raw.kv_cache, builder.build(raw.metadata))
    num_rows = case.rotated.expected.shape[0]
    torch.testing.assert_close(out[:num_rows].double(), case.rotated.expected, atol=5e-6, rtol=1e-4)
    check_rotated_cache(case)
    assert torch.equal(raw.query, before) == (computed_by == "torch")


@needs_cpp_compiler
@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("num_padded", [0, 2])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_prepared_launch_does_what_the_op_does(
    batch: str, num_padded: int, is_rotated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, in `out` and in the cache, however often it is launched."""
    for kernel in (norm_and_rotate.KERNEL, decode_attention.KERNEL):
        use_kernel(kernel, monkeypatch)
    found = []
    for is_prepared in (False, True):
        case = make_rotary_case(lens=BATCHES[batch], num_padded=num_padded, rotary_dim=6).raw
        rotary = make_rotary_case(lens=BATCHES[batch], num_padded=num_padded, rotary_dim=6).rotary
        out, backend = torch.full_like(case.query, float("nan")), SdpaBackend()
        builder = backend.metadata_builder([case.layer], case.kv_cache.key.shape[1], case.query.device, max_num_reqs=8)
        call, metadata = case.call(out, rotary if is_rotated else None), builder.build(case.metadata)
        if is_prepared:
            launch = backend.impl().prepare(call, case.kv_cache)
            query = case.query.clone()
            launch(metadata)
            case.query.copy_(query)
            launch(metadata)
        else:
            backend.impl().forward(call, case.kv_cache, metadata)
        found.append((out, case.kv_cache.key, case.kv_cache.value))
    for op, launched in zip(*found, strict=True):  # slots that nobody wrote are NaN
        torch.testing.assert_close(launched, op, atol=0, rtol=0, equal_nan=True)


def test_writes_new_keys_and_values_to_their_slots() -> None:
    case = make_case(lens=BATCHES["mixed"])
    run(case)
    slots = case.metadata.slot_mapping
    assert torch.equal(case.kv_cache.key.flatten(0, 1)[slots], case.key)
    assert torch.equal(case.kv_cache.value.flatten(0, 1)[slots], case.value)


class LargestTensor(TorchDispatchMode):
    """The number of values of the largest tensor that an op returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is not annotated
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple) else (out,):
            self.largest = max(self.largest, each.numel() if isinstance(each, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_decode_step_has_no_copy_of_a_key_for_each_head(is_masked: bool) -> None:
    query, key = torch.randn(2, 8, 16), torch.randn(2, 2, 32, 16)
    mask = torch.ones(2, 1, 1, 32, dtype=torch.bool).tril(30) if is_masked else None
    with LargestTensor() as seen:
        found = attend_one_query(query, key, key, mask, 0.25)
    assert seen.largest <= key.numel()
    repeated = key.repeat_interleave(4, dim=1)
    wanted = F.scaled_dot_product_attention(query.unsqueeze(2), repeated, repeated, attn_mask=mask, scale=0.25)
    torch.testing.assert_close(found.flatten(1, 2), wanted.squeeze(2), atol=1e-6, rtol=1e-5)


def test_slots_that_follow_one_another_are_read_in_place() -> None:
    assert _run_of(np.array([3, 4, 5])) == range(3, 6)
    assert _run_of(np.array([3, 5, 5])) is None and _run_of(np.array([3, 3, 5])) is None
    assert _run_of(np.array([], dtype=np.int64)) is None
    cached = _by_slot(torch.randn(4, 4, 2, 8))
    found = _read(cached, torch.tensor([[3, 4]]), torch.float32, range(3, 5))
    assert found.data_ptr() == cached[3].data_ptr()
    assert torch.equal(found, _read(cached, torch.tensor([[3, 4]]), torch.float32))


def test_padding_changes_nothing() -> None:
    """Padded rows leave every byte of the cache and of real rows as without them; their output is zero."""
    bare, padded = make_case(lens=BATCHES["mixed"]), make_case(lens=BATCHES["mixed"], num_padded=5)
    num_rows = bare.query.shape[0]
    bare_out, padded_out = run(bare), run(padded)
    assert torch.equal(padded_out[:num_rows], bare_out)
    assert not padded_out[num_rows:].any()
    for name in ("key", "value"):
        with_padding, without = getattr(padded.kv_cache, name), getattr(bare.kv_cache, name)
        assert torch.equal(with_padding.view(torch.int32), without.view(torch.int32))


def test_a_batch_of_padding_only_runs() -> None:
    case = make_case(lens=[(0, 1)], num_padded=3)
    before = case.kv_cache.key.clone()
    from tests.runner.attention.padding_batch import padding_only

    backend = SdpaBackend()
    metadata = backend.metadata_builder([case.layer], 4, torch.device("cpu"), max_num_reqs=8).build(
        padding_only(case.query.shape[0], torch.device("cpu"))
    )
    call = case.call()
    backend.impl().forward(call, case.kv_cache, metadata)
    assert not call.out.any()
    assert torch.equal(case.kv_cache.key.view(torch.int32), before.view(torch.int32))
