"""The flash_attn backend on a CPU, over stand-ins for its packages that check every argument."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from piecegraph.runner.attention.flash_attn import backend as flash_attn_backend
from piecegraph.runner.attention.flash_attn.backend import FlashAttnBackend, FlashAttnImpl
from piecegraph.runner.attention.flash_attn.choice import FlashAttnKernels
from piecegraph.runner.attention.flash_attn.kernels import FlashAttn2, FlashAttn3, FlashAttn4, FlashKernel
from piecegraph.runner.attention.flash_attn.metadata import FlashAttnMetadata, FlashAttnMetadataBuilder
from piecegraph.runner.attention.flash_attn.packages import Family
from piecegraph.runner.attention.interface.backend import AttentionCGSupport
from piecegraph.runner.attention.interface.layer import AttentionLayer
from tests.runner.attention.flash_attn.flash_attn_fakes import FakeFlashAttn2, fake_flash_attn_3, fake_flash_attn_4
from tests.runner.attention.padding_batch import padding_only
from tests.runner.attention.paged_case import PagedCase, make_case
from tests.runner.attention.rotary_case import NORMS, check_rotated_cache, make_rotary_case

CPU = torch.device("cpu")
FA2, FA3, FA4, TRITON = Family.FA2, Family.FA3, Family.FA4, Family.TRITON

PAIRS = {
    "fa2": (FlashAttnKernels(prefill=FA2, decode=FA2), 256),
    "fa3": (FlashAttnKernels(prefill=FA3, decode=FA3), 4),
    "fa4 and triton": (FlashAttnKernels(prefill=FA4, decode=TRITON), 4),
    "fa4 and fa2": (FlashAttnKernels(prefill=FA4, decode=FA2), 256),
}

BATCHES = {
    "one decode": [(9, 1)],
    "decodes": [(9, 1), (3, 1), (41, 1), (0, 1)],
    "padded decodes": [(9, 1), (300, 1), (0, 0), (0, 0)],
    "prefills": [(0, 21), (0, 4), (0, 1)],
    "mixed": [(9, 1), (270, 1), (0, 13), (7, 5), (4, 1), (0, 1)],
    "mixed, padded": [(9, 1), (0, 13), (0, 0)],
}

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one kv head": {"num_kv_heads": 1},
    "no groups": {"num_kv_heads": 4},
    "window": {"window": 5},
    "window of 1": {"window": 1},
    "softcap": {"softcap": 1.5},
    "window and softcap": {"window": 7, "softcap": 2.0},
}


def load(family: Family) -> FlashKernel:
    fakes: dict[Family, FlashKernel] = {
        FA2: FlashAttn2(FakeFlashAttn2()),
        FA3: FlashAttn3(fake_flash_attn_3),
        FA4: FlashAttn4(fake_flash_attn_4),
    }
    return fakes[family]


def case_of(pair: str, **options: Any) -> tuple[PagedCase, FlashAttnImpl, FlashAttnMetadataBuilder]:
    kernels, block_size = PAIRS[pair]
    case = make_case(dtype=torch.float16, block_size=block_size, **options)
    builder = FlashAttnBackend(kernels).metadata_builder([case.layer], block_size, CPU, max_num_reqs=8)
    return case, FlashAttnImpl(kernels, load), builder


def check(case: PagedCase, out: torch.Tensor) -> None:
    """The result is naive attention's; new keys and values are in their slots and nothing else was written."""
    torch.testing.assert_close(out[: case.expected.shape[0]].double(), case.expected, atol=2e-3, rtol=2e-3)
    is_real = case.metadata.slot_mapping >= 0
    slots = case.metadata.slot_mapping[is_real]
    for cached, new in ((case.kv_cache.key, case.key), (case.kv_cache.value, case.value)):
        assert torch.equal(cached.flatten(0, 1)[slots], new[is_real])
        written = int((~cached.flatten(0, 1).isnan()).any(-1).any(-1).sum())
        assert written == int(case.metadata.seq_lens.sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_mix_equals_naive_attention(pair: str, batch: str, kind: str) -> None:
    case, impl, builder = case_of(pair, lens=BATCHES[batch], num_padded=2, **KINDS[kind])
    call = case.call()
    impl.forward(call, case.kv_cache, builder.build(case.metadata))
    check(case, call.out)


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("pair", PAIRS)
def test_query_and_key_are_rotated_once(pair: str, batch: str, norm: str, is_prepared: bool) -> None:
    """By our decode kernel on the way, for all others in place before flash-attn's kernels run."""
    kernels, block_size = PAIRS[pair]
    case = make_rotary_case(
        lens=BATCHES[batch], num_padded=2, norm=norm, rotary_dim=6, dtype=torch.float16, block_size=block_size
    )
    raw, impl = case.raw, FlashAttnImpl(kernels, load)
    builder = FlashAttnBackend(kernels).metadata_builder([raw.layer], block_size, CPU, max_num_reqs=8)
    call, metadata = raw.call(rotary=case.rotary), builder.build(raw.metadata)
    if is_prepared:
        impl.prepare(call, raw.kv_cache)(metadata)
    else:
        impl.forward(call, raw.kv_cache, metadata)
    num_rows = case.rotated.expected.shape[0]
    torch.testing.assert_close(call.out[:num_rows].double(), case.rotated.expected, atol=6e-3, rtol=2e-3)
    check_rotated_cache(case)


@pytest.mark.parametrize("batch", BATCHES)
def test_sinks_and_narrow_values_go_to_flash_attn_4_and_triton(batch: str) -> None:
    case, impl, builder = case_of("fa4 and triton", lens=BATCHES[batch], has_sinks=True, value_dim=6, window=6)
    assert case.sinks is not None
    case = replace(case, sinks=torch.nn.Parameter(case.sinks))
    call = case.call()
    with torch.no_grad():
        impl.forward(call, case.kv_cache, builder.build(case.metadata))
    check(case, call.out)


@pytest.mark.parametrize("pair", PAIRS)
def test_tokens_may_lie_apart(pair: str) -> None:
    """As slices of one projection's result do."""
    case, impl, builder = case_of(pair, lens=BATCHES["mixed"])
    merged = torch.cat([case.query, case.key, case.value], dim=1)
    query, key, value = merged.split([4, 2, 2], dim=1)
    assert not query.is_contiguous()
    call = case.call()._replace(query=query, key=key, value=value)
    impl.forward(call, case.kv_cache, builder.build(case.metadata))
    check(case, call.out)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("lens", [[(9, 1), (3, 1), (20, 1)], [(9, 4), (3, 4), (20, 4)]])
def test_a_call_reads_its_batch_when_it_is_repeated(pair: str, lens: list[tuple[int, int]]) -> None:
    """As a recorded graph repeats it: the same metadata, whose tensors were refilled in place."""
    case, impl, builder = case_of(pair, lens=lens)
    metadata = builder.init_capture(case.metadata)
    call = case.call()
    launch = impl.prepare(call, case.kv_cache)
    launch(metadata)
    builder.prepare_for_replay(metadata)
    expected = case.expected.unflatten(0, (3, -1)).flip(0).flatten(0, 1)
    for buffer in (metadata.seq_lens, metadata.block_table):
        buffer.copy_(buffer.flip(0).clone())
    for buffer in (metadata.slot_mapping, case.query, case.key, case.value):
        buffer.copy_(buffer.unflatten(0, (3, -1)).flip(0).flatten(0, 1).clone())
    launch(metadata)
    torch.testing.assert_close(call.out.double(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("pair", PAIRS)
def test_padding_only_runs_nothing(pair: str) -> None:
    """As in the profile run: no package is called for no requests, and no key is written."""
    case, _, builder = case_of(pair, lens=[(0, 1)], num_padded=3)

    def refuse(family: Family) -> FlashKernel:
        raise AssertionError(family)

    call = case.call()
    metadata = builder.build(padding_only(case.query.shape[0], CPU))
    FlashAttnImpl(PAIRS[pair][0], refuse).forward(call, case.kv_cache, metadata)
    assert call.out.isnan().all()
    assert case.kv_cache.key.isnan().all()


def test_the_number_of_splits_does_not_follow_lengths() -> None:
    """flash-attn 2 is left to choose it, from shapes that a bucket fixes."""
    fake = FakeFlashAttn2()
    kernels, _ = PAIRS["fa2"]
    for lens in ([(9, 1), (3, 1)], [(600, 1), (0, 1)]):
        case, _, builder = case_of("fa2", lens=lens)
        impl = FlashAttnImpl(kernels, lambda family: FlashAttn2(fake))
        impl.forward(case.call(), case.kv_cache, builder.build(case.metadata))
    assert fake.splits == [0, 0]


def test_metadata_splits_a_batch_in_decodes_and_others() -> None:
    case, _, builder = case_of("fa2", lens=BATCHES["mixed"], num_padded=2)
    metadata = builder.build(case.metadata)
    assert metadata.decode is not None
    assert metadata.decode.seq_lens.tolist() == [10, 271]
    assert metadata.prefill is not None
    assert (metadata.prefill.first_row, metadata.prefill.max_query_len) == (2, 13)
    assert metadata.prefill.query_start_loc.tolist() == [2, 15, 20, 21, 22]
    assert metadata.prefill.seq_lens.tolist() == [13, 12, 5, 1]
    assert metadata.write_from == 0
    assert metadata.triton_decode is None


@pytest.mark.parametrize(("batch", "write_from"), [("decodes", 6), ("mixed", 2), ("prefills", 0)])
def test_our_decode_kernel_writes_its_own_keys(batch: str, write_from: int) -> None:
    """So the write kernel starts after them, and is not launched where nothing else runs."""
    case, _, builder = case_of("fa4 and triton", lens=BATCHES[batch], num_padded=2)
    metadata = builder.build(case.metadata)
    assert metadata.write_from == write_from
    assert metadata.decode is None
    assert (metadata.triton_decode is None) == (batch == "prefills")
    if metadata.triton_decode is not None:
        assert metadata.triton_decode.num_reqs == metadata.triton_decode.num_decode_reqs == metadata.num_decode_reqs


def test_our_decode_kernel_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads cached keys before the preceding kernel has ended, which must not be the one that writes them."""
    case, impl, builder = case_of("fa4 and triton", lens=BATCHES["mixed"], num_padded=2)
    order: list[str] = []
    for owner, name in ((impl, "_write"), (impl, "attend"), (impl._triton, "forward")):
        monkeypatch.setattr(owner, name, lambda *tensors, _name=name, **options: order.append(_name))
    impl.forward(case.call(), case.kv_cache, builder.build(case.metadata))
    assert order == ["_write", "attend", "forward"]


def test_views_keep_the_addresses_of_the_fixed_buffers() -> None:
    case, _, builder = case_of("fa4 and fa2", lens=BATCHES["mixed"])
    metadata = builder.init_capture(case.metadata)
    assert isinstance(metadata, FlashAttnMetadata)
    assert metadata.decode is not None
    assert metadata.prefill is not None
    assert metadata.decode.block_table.data_ptr() == case.metadata.block_table.data_ptr()
    assert metadata.prefill.block_table.data_ptr() == case.metadata.block_table[2:].data_ptr()
    assert metadata.prefill.query_start_loc.data_ptr() == case.metadata.query_start_loc[2:].data_ptr()


LAYER = AttentionLayer(
    name="layers.0", num_q_heads=16, num_kv_heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16, scale=1.0,
    window=0, softcap=0.0, has_sinks=False,
)  # fmt: skip
CUDA = torch.device("cuda")


def assume_gpu(monkeypatch: pytest.MonkeyPatch, *here: Family) -> None:
    packages = {family: None if family in (*here, TRITON) else "not installed" for family in Family}
    monkeypatch.setattr(flash_attn_backend, "installed", lambda: packages)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_a_kernel_that_fails_when_tried_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    assume_gpu(monkeypatch, FA2, FA3, FA4)

    def refusals(kernels: FlashAttnKernels, *args: object) -> dict[Family, str]:
        return {FA3: "its prefill failed here: no paged K/V"} if kernels.prefill is FA3 else {}

    monkeypatch.setattr(flash_attn_backend, "refusals", refusals)
    backend = FlashAttnBackend()
    assert backend.unsupported_reason([LAYER], CUDA, 16) is None
    fitted = backend.fitted([LAYER], CUDA, 16)
    assert fitted.notes[:2] == (
        "prefill by flash-attn 4, decode by triton",
        "not flash-attn 3: its prefill failed here: no paged K/V",
    )
    assert fitted.cudagraph_support is AttentionCGSupport.ALWAYS
    assert backend.cudagraph_support is AttentionCGSupport.NEVER


def test_when_every_kernel_fails_all_reasons_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assume_gpu(monkeypatch, FA2, FA4)
    monkeypatch.setattr(flash_attn_backend, "refusals", lambda kernels, *args: {kernels.prefill: "out of luck"})
    reason = FlashAttnBackend().unsupported_reason([LAYER], CUDA, 256)
    assert reason is not None
    assert "flash-attn 4: out of luck. flash-attn 2: out of luck." in reason


def test_without_a_gpu_a_hopper_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    assume_gpu(monkeypatch, FA3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backend = FlashAttnBackend()
    assert backend.layers_unsupported_reason([LAYER], 16) is None
    assert "give block_size=16 or 32" in (backend.layers_unsupported_reason([LAYER], 64) or "")
    assert backend.fitted([LAYER], CUDA, 16).notes[0] == "prefill by flash-attn 3, decode by flash-attn 3"
