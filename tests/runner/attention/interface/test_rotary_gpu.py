"""Norm and rotary embedding within our kernels on a GPU, at real sizes, against the torch reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.interface.rotary import Rotary
from piecegraph.runner.attention.triton.backend import TritonBackend
from piecegraph.runner.attention.triton.reference import paged_attention, rotated, write_kv
from tests.runner.attention.rotary_case import NORMS
from tests.runner.attention.triton.test_backend_gpu import DECODES, LAYERS, MIXED, TOLERANCE, Case

pytestmark = pytest.mark.gpu

NAMES = ["qwen3-0.6b", "smollm2", "mqa", "dim 80", "dim 256", "gemma-2", "gpt-oss", "float16", "float32"]


@dataclass
class RotatedCase(Case):
    norm: str = "norm"
    rotary_dim: int | None = None
    rotary: Rotary = field(init=False)
    raw: torch.Tensor = field(init=False)  # the projection's output before the call

    def __post_init__(self) -> None:
        super().__post_init__()
        norm, dim = dict(NORMS[self.norm]), self.layer.key_dim
        angles = torch.rand(self.num_tokens, self.rotary_dim or dim, generator=self.random, device="cuda") * 6.3
        has_weights = norm.pop("has_weights", False)
        weights = [self.normal(dim) if has_weights else None for _ in range(2)]
        self.rotary = Rotary(
            cos=angles.cos(), sin=angles.sin(), q_norm_weight=weights[0], k_norm_weight=weights[1], **norm
        )

    @property
    def call(self) -> AttentionCall:
        """The layer's call over all rows."""
        return super().call._replace(rotary=self.rotary)

    def fill(self, lens: list[tuple[int, int]]) -> AttentionMetadata:
        metadata = super().fill(lens)
        self.raw = self.qkv.clone()
        return metadata

    def check(self) -> None:
        """Keys in the cache are rotated, within a rounding; so is what is attended."""
        num_rows, layer = int(self.query_start_loc[-1]), self.layer
        sizes = [layer.num_q_heads * layer.key_dim, layer.num_kv_heads * layer.key_dim]
        query = self.raw[:, : sizes[0]].unflatten(1, (layer.num_q_heads, layer.key_dim))
        key = self.raw[:, sizes[0] : sum(sizes)].unflatten(1, (layer.num_kv_heads, layer.key_dim))
        query, key = rotated(query, key, self.rotary)
        cache = KVCache(self.kv_cache.key.clone(), self.kv_cache.value.clone())
        write_kv(key, self.value, kv_cache=cache, slot_mapping=self.slot_mapping)
        rtol = max(torch.finfo(layer.dtype).eps, 1e-5)
        torch.testing.assert_close(self.kv_cache.key, cache.key, rtol=rtol, atol=2e-5, equal_nan=True)
        torch.testing.assert_close(self.kv_cache.value, cache.value, rtol=0, atol=0, equal_nan=True)
        expected = torch.full(self.out.shape, float("nan"), device="cuda")
        paged_attention(
            self.call._replace(query=query, out=expected), cache, query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens, block_table=self.block_table,
        )  # fmt: skip
        found, expected = self.out[:num_rows].float(), expected[:num_rows]
        error = float((found - expected).norm() / expected.norm()) if num_rows else 0.0
        assert error < TOLERANCE[layer.dtype], error
        assert self.out[num_rows:].isnan().all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", NAMES)
def test_decode(name: str, norm: str) -> None:
    case = RotatedCase(LAYERS[name], 12, 12, 330, 700, norm=norm)
    common = case.fill(DECODES)
    for num_reqs in (len(DECODES), case.num_reqs):  # a real batch; one padded with requests
        case.out.fill_(float("nan"))
        case.forward(case.builder.build(replace(common, num_reqs=num_reqs, num_decode_reqs=num_reqs)))
        case.check()
    assert torch.equal(case.qkv, case.raw), "a decode step leaves the projection as it was"


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", NAMES)
def test_mixed(name: str, norm: str) -> None:
    case = RotatedCase(LAYERS[name], 7, 400, 80, 300, norm=norm)
    case.forward(case.builder.build(case.fill(MIXED)))
    case.check()


@pytest.mark.parametrize("rotary_dim", [16, 20, 32, 64])
def test_partial_rotary(rotary_dim: int) -> None:
    for lens in (DECODES[:7], MIXED):
        case = RotatedCase(LAYERS["dim 80"], 7, 400, 330, 700, norm="no norm", rotary_dim=rotary_dim)
        case.forward(case.builder.build(case.fill(lens)))
        case.check()


def test_a_captured_batch_is_rotated_once_a_replay() -> None:
    """Capture and warm-up rotate what lies in the buffers, again and again; a replay starts from what is put there."""
    case = RotatedCase(LAYERS["qwen3-0.6b"], 8, 512, 330, 900)
    metadata = case.builder.init_capture(replace(case.fill([]), num_decode_reqs=0, max_query_len=512))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.forward(metadata)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.forward(metadata)
    for lens in ([(0, 512)], [(100, 1)] * 8, MIXED, [], [(900, 100), (5, 1)]):
        case.fill(lens)
        graph.replay()
        case.check()


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gpt-oss", "gemma-2"])
def test_prepared_launches_equal_ordinary_ones(name: str) -> None:
    """Bitwise, and one preparation fits every batch of the bucket."""
    case = RotatedCase(LAYERS[name], 16, 400, 330, 1200)
    launch = TritonBackend().impl().prepare(case.call, case.kv_cache)
    for lens in (MIXED, DECODES, [(0, 400)], [(5000, 1)], [(30, 2), (40, 3)], [(10, 1)] * 16):
        metadata = case.builder.build(replace(case.fill(lens), num_reqs=len(lens)))
        launch(metadata)
        case.check()
        prepared = case.out.clone()
        case.qkv.copy_(case.raw)
        case.out.fill_(float("nan"))
        case.forward(metadata)
        assert torch.equal(prepared.view(torch.int16), case.out.view(torch.int16))
