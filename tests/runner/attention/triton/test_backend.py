"""The triton backend: its torch references on a CPU, its kernels in Triton's interpreter, and both on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from piecegraph.passes.kernels.common.gpu_limits import GpuLimits
from piecegraph.runner.attention.interface.backend import AttentionCGSupport
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.triton.backend import TritonBackend, layer_unsupported_reason
from piecegraph.runner.attention.triton.metadata import TritonMetadataBuilder, allocate_workspace, head_shape
from tests.interpreter import interpreted_case
from tests.runner.attention.padding_batch import padding_only
from tests.runner.attention.paged_case import PagedCase, make_case
from tests.runner.attention.rotary_case import NORMS, RotaryCase, assert_rotated, check_rotated_cache, make_rotary_case

CPU = torch.device("cpu")

BATCHES = {
    "one decode": [(9, 1)],
    "decodes": [(9, 1), (3, 1), (41, 1), (0, 1)],
    "padded decodes": [(9, 1), (41, 1), (0, 0), (0, 0)],
    "prefills": [(0, 21), (0, 4), (0, 1)],
    "mixed": [(9, 1), (30, 1), (0, 13), (7, 5), (4, 1), (0, 1)],
}

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one kv head": {"num_kv_heads": 1},
    "window": {"window": 5},
    "window of 1": {"window": 1},
    "chunks": {"chunk_size": 5},
    "softcap": {"softcap": 1.5},
    "sinks": {"has_sinks": True},
    "all at once": {"window": 5, "softcap": 2.0, "has_sinks": True, "value_dim": 6},
    "odd block": {"block_size": 3},
}


def builder_of(case: PagedCase) -> TritonMetadataBuilder:
    block_size = case.kv_cache.key.shape[1]
    return TritonBackend().metadata_builder([case.layer], block_size, case.query.device, max_num_reqs=8)


def run(case: PagedCase, builder: TritonMetadataBuilder | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    call = case.call(out)
    TritonBackend().impl().forward(call, case.kv_cache, (builder or builder_of(case)).build(case.metadata))
    return call.out


def check_cache(case: PagedCase) -> None:
    """New keys and values are in their slots, and nothing else was written."""
    is_real = case.metadata.slot_mapping >= 0
    slots = case.metadata.slot_mapping[is_real]
    num_written = int(case.metadata.seq_lens.sum())
    for cached, new in ((case.kv_cache.key, case.key), (case.kv_cache.value, case.value)):
        assert torch.equal(cached.flatten(0, 1)[slots], new[is_real])
        assert int((~cached.flatten(0, 1).isnan()).any(-1).any(-1).sum()) == num_written


BIASES: dict[str, dict[str, Any]] = {
    "bias by position": {"slopes_dtype": torch.float32},
    "rounded bias": {"slopes_dtype": torch.bfloat16, "num_kv_heads": 1},
}
"""What the references have and the kernels have not."""


@pytest.mark.parametrize("kind", [*KINDS, *BIASES])
@pytest.mark.parametrize("batch", BATCHES)
def test_on_a_cpu_equals_naive_attention(batch: str, kind: str) -> None:
    case = make_case(lens=BATCHES[batch], num_padded=2, **{**KINDS, **BIASES}[kind])
    out, num_rows = run(case), case.expected.shape[0]
    torch.testing.assert_close(out[:num_rows].double(), case.expected, atol=2e-6, rtol=1e-5)
    if kind != "chunks":  # those before the chunk of a new token were never written
        check_cache(case)


def run_rotary(case: RotaryCase, builder: TritonMetadataBuilder) -> torch.Tensor:
    raw = case.raw
    call = raw.call(rotary=case.rotary)
    TritonBackend().impl().forward(call, raw.kv_cache, builder.build(raw.metadata))
    return call.out


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("batch", BATCHES)
def test_on_a_cpu_query_and_key_are_rotated_on_the_way(batch: str, norm: str) -> None:
    case = make_rotary_case(lens=BATCHES[batch], num_padded=2, norm=norm, rotary_dim=6)
    out, num_rows = run_rotary(case, builder_of(case.raw)), case.rotated.expected.shape[0]
    torch.testing.assert_close(out[:num_rows].double(), case.rotated.expected, atol=5e-6, rtol=1e-4)
    check_rotated_cache(case)


def test_a_prepared_call_rotates_at_each_launch() -> None:
    case = make_rotary_case(lens=BATCHES["mixed"], norm="norm")
    raw, out = case.raw, torch.full_like(case.raw.query, float("nan"))
    launch = TritonBackend().impl().prepare(raw.call(out, case.rotary), raw.kv_cache)
    for _ in range(2):
        launch(builder_of(raw).build(raw.metadata))
        torch.testing.assert_close(out.double(), case.rotated.expected, atol=5e-6, rtol=1e-4)


def test_a_call_reads_its_batch_when_it_is_repeated() -> None:
    """As a recorded graph repeats it: the same metadata, whose tensors were refilled in place."""
    case = make_case(lens=[(9, 1), (3, 1), (20, 1)])
    metadata = builder_of(case).init_capture(case.metadata)
    builder_of(case).prepare_for_replay(metadata)
    out = torch.full_like(case.query, float("nan"))
    launch = TritonBackend().impl().prepare(case.call(out), case.kv_cache)
    launch(metadata)
    expected = case.expected.flip(0)
    for buffer in (metadata.seq_lens, metadata.block_table, metadata.slot_mapping, case.query, case.key, case.value):
        buffer.copy_(buffer.flip(0).clone())
    launch(metadata)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


def test_padding_only_writes_nothing() -> None:
    """As in the profile run."""
    case = make_case(lens=[(0, 1)], num_padded=3)
    before = case.kv_cache.key.clone()
    batch = replace(case, metadata=padding_only(case.query.shape[0], CPU))
    assert run(batch).isnan().all()
    assert torch.equal(case.kv_cache.key.view(torch.int32), before.view(torch.int32))


def test_it_fits_any_graph_and_needs_no_host_batch() -> None:
    assert TritonBackend.cudagraph_support is AttentionCGSupport.ALWAYS
    assert not TritonBackend.needs_host_batch
    case = make_case(lens=[(9, 1), (0, 3)])
    run(replace(case, metadata=replace(case.metadata, host=None)))


LAYER = AttentionLayer(
    name="layers.0", num_q_heads=16, num_kv_heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16, scale=1.0,
    window=0, softcap=0.0, has_sinks=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"key_dim": 80, "value_dim": 96}, None),
        ({"dtype": torch.float64}, "layers.0 computes in torch.float64; the kernels have torch.bfloat16, "),
        ({"value_dim": 512}, "layers.0 has heads of 128 (keys) and 512 (values); the kernels go up to 256."),
        ({"has_slopes": True}, "layers.0 adds a bias by position to its scores (ALiBi); the kernels add none."),
        ({"num_q_heads": 129, "num_kv_heads": 1}, "129 query heads a KV head; the kernels take up to 128"),
    ],
)
def test_what_the_kernels_cannot_run_has_a_reason(change: dict[str, Any], reason: str | None) -> None:
    found = layer_unsupported_reason(replace(LAYER, **change))
    assert found is None if reason is None else found is not None and reason in found


def test_a_cpu_runs_every_layer_and_other_devices_none() -> None:
    backend = TritonBackend()
    assert backend.unsupported_reason([replace(LAYER, dtype=torch.float64, key_dim=999)], CPU, 16) is None
    reason = backend.unsupported_reason([LAYER], torch.device("meta"), 16)
    assert reason is not None
    assert "not on 'meta'" in reason


def check_kernels(**kind: Any) -> None:
    """The launches a GPU would get, on two steps over one builder's workspace."""
    gpu = GpuLimits(num_sms=3, shared_bytes=99 * 2**10)
    case = make_case(**kind)
    workspace = allocate_workspace({head_shape(case.layer)}, 8, gpu, CPU)
    builder = TritonMetadataBuilder(case.kv_cache.key.shape[1], 8, gpu, workspace)
    num_rows = case.expected.shape[0]
    for _ in range(2):
        out = run(case, builder)
        torch.testing.assert_close(out[:num_rows].double(), case.expected, atol=2e-5, rtol=1e-4)
        assert out[num_rows:].isnan().all()
    check_cache(case)


def check_rotary_kernels(**kind: Any) -> None:
    """The launches a GPU would get. Each row is rotated once: a decode request's on the way, any other's in place."""
    gpu = GpuLimits(num_sms=3, shared_bytes=99 * 2**10)
    case = make_rotary_case(**kind)
    raw = case.raw
    workspace = allocate_workspace({head_shape(raw.layer)}, 8, gpu, CPU)
    builder = TritonMetadataBuilder(raw.kv_cache.key.shape[1], 8, gpu, workspace)
    num_rows, before = case.rotated.expected.shape[0], raw.query.clone()
    out = run_rotary(case, builder)
    torch.testing.assert_close(out[:num_rows].double(), case.rotated.expected, atol=3e-5, rtol=1e-3)
    assert out[num_rows:].isnan().all()
    check_rotated_cache(case)
    num_decode_reqs = raw.metadata.num_decode_reqs
    assert torch.equal(raw.query[:num_decode_reqs], before[:num_decode_reqs])
    if num_decode_reqs < raw.metadata.num_reqs:
        assert_rotated(raw.query[num_decode_reqs:], case.rotated.query[num_decode_reqs:])
    kernels = ["kv_write_kernel", "prefill_kernel"] if num_decode_reqs < raw.metadata.num_reqs else []
    kernels += ["decode_kernel"] if num_decode_reqs else []
    assert kernel_names(case, builder) == kernels


def kernel_names(case: RotaryCase, builder: TritonMetadataBuilder) -> list[str]:
    """The launches of a batch."""
    from piecegraph.runner.attention.triton.calls import LayerCall, kernel_calls

    raw = case.raw
    layer = LayerCall(raw.call(rotary=case.rotary), raw.kv_cache)
    return [call.kernel.__name__ for call in kernel_calls(layer, builder.build(raw.metadata))]


def check_padding_only() -> None:
    gpu = GpuLimits(num_sms=3, shared_bytes=99 * 2**10)
    case = make_case(lens=[(0, 1)], num_padded=3)
    builder = TritonMetadataBuilder(4, 8, gpu, allocate_workspace({head_shape(case.layer)}, 8, gpu, CPU))
    batch = replace(case, metadata=padding_only(case.query.shape[0], CPU))
    assert run(batch, builder).isnan().all()
    assert case.kv_cache.key.isnan().all()


CASES = {
    **{batch: partial(check_kernels, lens=lens, num_padded=2) for batch, lens in BATCHES.items()},
    "all at once": partial(
        check_kernels, lens=BATCHES["mixed"], window=7, softcap=2.0, has_sinks=True, key_dim=12, value_dim=20
    ),
    "nothing but padding": check_padding_only,
    **{
        f"{batch}, rotated": partial(check_rotary_kernels, lens=lens, num_padded=2, norm="norm", rotary_dim=6)
        for batch, lens in BATCHES.items()
    },
    "mixed, window and softcap, rotated": partial(
        check_rotary_kernels, lens=BATCHES["mixed"], window=7, softcap=2.0, key_dim=64, value_dim=64
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_its_launches_equal_naive_attention(name: str) -> None:
    interpreted_case(__name__, name)
