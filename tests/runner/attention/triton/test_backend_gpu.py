"""The triton backend on a GPU, at real sizes, against its torch reference in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any

import pytest
import torch

from piecegraph.runner.attention.interface.kv_cache import KVCache
from piecegraph.runner.attention.interface.layer import AttentionLayer
from piecegraph.runner.attention.interface.metadata import PAD_SLOT_ID, AttentionMetadata
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.triton.backend import TritonBackend
from piecegraph.runner.attention.triton.metadata import TritonMetadataBuilder
from piecegraph.runner.attention.triton.reference import paged_attention, write_kv

pytestmark = pytest.mark.gpu

POISON = 0x7F7F7F7F

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative root mean square error; the rounding of the result alone is a third of it in the short types."""


@pytest.fixture(autouse=True)
def _exact_reference() -> Iterator[None]:
    """The reference multiplies in float32, not in TensorFloat-32; memory is returned between tests."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.cuda.empty_cache()


@dataclass
class Case:
    """A batch in fixed buffers, as the runner holds one. `fill` puts other requests into it."""

    layer: AttentionLayer
    num_reqs: int
    num_tokens: int
    max_blocks: int
    num_blocks: int
    block_size: int = 16
    first_block: int = 0  # blocks before it are not used
    seed: int = 0

    def __post_init__(self) -> None:
        layer, device = self.layer, torch.device("cuda")
        self.random = torch.Generator(device=device).manual_seed(self.seed)
        qkv_width = layer.num_q_heads * layer.key_dim + layer.num_kv_heads * (layer.key_dim + layer.value_dim)
        self.qkv = torch.zeros(self.num_tokens, qkv_width, dtype=layer.dtype, device=device)  # one projection's output
        query, key, value = self.qkv.split(
            [
                layer.num_q_heads * layer.key_dim,
                layer.num_kv_heads * layer.key_dim,
                layer.num_kv_heads * layer.value_dim,
            ],
            dim=1,
        )
        self.query = query.unflatten(1, (layer.num_q_heads, layer.key_dim))
        self.key = key.unflatten(1, (layer.num_kv_heads, layer.key_dim))
        self.value = value.unflatten(1, (layer.num_kv_heads, layer.value_dim))
        self.out = torch.empty(self.num_tokens, layer.num_q_heads, layer.value_dim, dtype=layer.dtype, device=device)
        self.sinks = self.normal(layer.num_q_heads) if layer.has_sinks else None
        blocks = (self.num_blocks, self.block_size, layer.num_kv_heads)
        self.kv_cache = KVCache(
            torch.full((*blocks, layer.key_dim), float("nan"), dtype=layer.dtype, device=device),
            torch.full((*blocks, layer.value_dim), float("nan"), dtype=layer.dtype, device=device),
        )
        self.query_start_loc = torch.zeros(self.num_reqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(self.num_reqs, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(self.num_reqs, self.max_blocks, dtype=torch.int32, device=device)
        self.slot_mapping = torch.zeros(self.num_tokens, dtype=torch.int64, device=device)
        self.builder: TritonMetadataBuilder = TritonBackend().metadata_builder(
            [layer], self.block_size, device, max_num_reqs=self.num_reqs
        )

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random, device="cuda").to(self.layer.dtype)

    def fill(self, lens: list[tuple[int, int]]) -> AttentionMetadata:
        """Requests of (tokens cached, tokens new), in blocks of their own. What is not used is poisoned: NaN in the
        cache, block numbers that would fault."""
        for cached in (self.kv_cache.key, self.kv_cache.value):
            cached.fill_(float("nan"))
        self.block_table.fill_(POISON)
        self.slot_mapping.fill_(PAD_SLOT_ID)
        self.seq_lens.zero_()
        self.qkv.copy_(self.normal(*self.qkv.shape))
        self.out.fill_(float("nan"))
        starts = [0, *accumulate(new for _, new in lens)]
        self.query_start_loc.copy_(torch.tensor([*starts, *[starts[-1]] * (self.num_reqs - len(lens))]))
        free = iter((self.first_block + torch.randperm(self.num_blocks - self.first_block)).tolist())
        for request, (past, new) in enumerate(lens):
            blocks = torch.tensor([next(free) for _ in range(-(-(past + new) // self.block_size))], device="cuda")
            self.block_table[request, : len(blocks)] = blocks
            self.seq_lens[request] = past + new
            positions = torch.arange(past + new, device="cuda")
            slots = blocks[positions // self.block_size] * self.block_size + positions % self.block_size
            for cached in (self.kv_cache.key, self.kv_cache.value):
                cached[slots[:past] // self.block_size, slots[:past] % self.block_size] = self.normal(
                    past, *cached.shape[2:]
                )
            self.slot_mapping[starts[request] : starts[request + 1]] = slots[past:]
        return AttentionMetadata(
            num_reqs=self.num_reqs,
            num_tokens=self.num_tokens,
            max_query_len=max((new for _, new in lens), default=1),
            num_decode_reqs=sum(1 for _ in takewhile(lambda pair: pair[1] == 1, lens)),
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            slot_mapping=self.slot_mapping,
            host=None,
        )

    @property
    def call(self) -> AttentionCall:
        """The layer's call over all rows."""
        layer = self.layer
        return AttentionCall(
            self.query, self.key, self.value, self.out, layer.scale, layer.window, layer.softcap, self.sinks
        )

    def forward(self, metadata: AttentionMetadata) -> None:
        TritonBackend().impl().forward(self.call, self.kv_cache, metadata)

    def check(self) -> None:
        """The result, and the cache, are the reference's; padded rows of the result are untouched."""
        num_rows = int(self.query_start_loc[-1])
        cache = KVCache(self.kv_cache.key.clone(), self.kv_cache.value.clone())
        write_kv(self.key, self.value, kv_cache=cache, slot_mapping=self.slot_mapping)
        for written, expected in ((self.kv_cache.key, cache.key), (self.kv_cache.value, cache.value)):
            as_bits = torch.int32 if written.dtype == torch.float32 else torch.int16
            assert torch.equal(written.view(as_bits), expected.view(as_bits))
        expected = torch.full(self.out.shape, float("nan"), device="cuda")
        paged_attention(
            self.call._replace(out=expected), cache, query_start_loc=self.query_start_loc, seq_lens=self.seq_lens,
            block_table=self.block_table,
        )  # fmt: skip
        out, expected = self.out[:num_rows].float(), expected[:num_rows]
        error = float((out - expected).norm() / expected.norm()) if num_rows else 0.0
        assert error < TOLERANCE[self.layer.dtype], error
        assert self.out[num_rows:].isnan().all()


def layer(
    num_q_heads: int = 16, num_kv_heads: int = 8, dim: int = 128, dtype: torch.dtype = torch.bfloat16, **kind: Any
) -> AttentionLayer:
    plain = AttentionLayer(
        name="layer", num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, key_dim=dim, value_dim=dim, dtype=dtype,
        scale=dim**-0.5, window=0, softcap=0.0, has_sinks=False,
    )  # fmt: skip
    return replace(plain, **kind)


LAYERS = {
    "qwen3-0.6b": layer(),
    "llama-8b": layer(32, 8),
    "smollm2": layer(9, 3, 64),
    "no groups": layer(8, 8, 64),
    "mqa": layer(71, 1, 64),
    "dim 80": layer(8, 8, 80),
    "dim 96": layer(8, 4, 96),
    "dim 256": layer(8, 4, 256),
    "narrow values": layer(8, 4, 192, value_dim=128),
    "gemma-2": layer(8, 4, 256, window=512, softcap=50.0),
    "gpt-oss": layer(64, 8, 64, window=128, has_sinks=True),
    "float16": layer(dtype=torch.float16),
    "float32": layer(9, 3, 64, dtype=torch.float32),
    "float32, dim 256": layer(4, 1, 256, dtype=torch.float32),
}

DECODES = [(0, 1), (1023, 1), (1, 1), (15, 1), (16, 1), (5000, 1), (600, 1), (63, 1), (64, 1)]
MIXED = [(700, 1), (5, 1), (0, 300), (1000, 65), (16, 16), (250, 2), (0, 1)]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_decode(name: str, block_size: int) -> None:
    case = Case(LAYERS[name], 12, 12, -(-5001 // block_size) + 1, 7000 // block_size + 24, block_size=block_size)
    common = case.fill(DECODES)
    for num_decode_reqs in (len(DECODES), case.num_reqs):  # a real batch; one padded with requests
        case.out.fill_(float("nan"))
        batch = replace(common, num_reqs=num_decode_reqs, num_decode_reqs=num_decode_reqs)
        case.forward(case.builder.build(batch))
        case.check()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_mixed(name: str, block_size: int) -> None:
    case = Case(LAYERS[name], 7, 400, -(-1100 // block_size) + 1, 3200 // block_size + 24, block_size=block_size)
    case.forward(case.builder.build(case.fill(MIXED)))
    case.check()


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gpt-oss", "mqa"])
def test_a_long_context(name: str) -> None:
    """One request of 32k tokens takes many splits."""
    case = Case(LAYERS[name], 1, 1, 2048, 2100)
    case.forward(case.builder.build(case.fill([(32_767, 1)])))
    case.check()


def test_a_large_batch() -> None:
    case = Case(LAYERS["qwen3-0.6b"], 256, 256, 80, 256 * 66)
    lens = torch.randint(700, 1040, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    case.forward(case.builder.build(case.fill([(length, 1) for length in lens])))
    case.check()


@pytest.mark.parametrize(
    "lens",
    [[32_000, *[100] * 63], [*[100] * 30, 2048, 2049, 2050, 9000, *[40] * 30], [2500] * 64],
    ids=["one", "some", "more than there are programs for"],
)
def test_a_large_batch_with_long_requests(lens: list[int]) -> None:
    """They are split, the others are not; and so in a batch after it, where other requests are long."""
    case = Case(LAYERS["qwen3-0.6b"], 64, 64, 2048, 12_000)
    for each in (lens, lens[::-1]):
        case.forward(case.builder.build(case.fill([(length, 1) for length in each])))
        case.check()


def test_a_long_prompt_and_its_chunks() -> None:
    case = Case(LAYERS["qwen3-0.6b"], 3, 4096, 300, 700)
    case.forward(case.builder.build(case.fill([(0, 2048), (2000, 1024), (3000, 1000)])))
    case.check()


def test_offsets_beyond_32_bits() -> None:
    """Blocks whose first element is number 2**31 of the cache, and more."""
    block_elements = 16 * 8 * 128
    first_block = 2**31 // block_elements
    case = Case(LAYERS["qwen3-0.6b"], 4, 64, 80, first_block + 300, first_block=first_block)
    case.forward(case.builder.build(case.fill([(1000, 1), (900, 1), (500, 1), (400, 60)])))
    case.check()


def captured(case: Case, common: AttentionMetadata) -> torch.cuda.CUDAGraph:
    metadata = case.builder.init_capture(common)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.forward(metadata)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.forward(metadata)
    case.builder.prepare_for_replay(metadata)
    return graph


@pytest.mark.parametrize("num_reqs", [1, 8, 64])
def test_a_captured_decode_fits_any_batch(num_reqs: int) -> None:
    """Captured over padding alone, replayed over batches of other lengths, with and without padded requests."""
    case = Case(LAYERS["qwen3-0.6b"], num_reqs, num_reqs, 520, 600 * num_reqs)
    case.fill([])
    graph = captured(case, replace(case.fill([]), num_decode_reqs=num_reqs, max_query_len=1))
    for lens in ([(8100, 1)], [(0, 1)], [(17, 1), (3000, 1)] * (num_reqs // 2), [], [(63, 1)] * num_reqs):
        case.fill(lens)
        graph.replay()
        graph.replay()  # nothing of the first is left in the workspace
        case.check()


def test_a_captured_mixed_batch_fits_any_batch() -> None:
    """Of its numbers of rows and requests: FULL for batches that are not uniform."""
    case = Case(LAYERS["qwen3-0.6b"], 8, 512, 80, 600)
    graph = captured(case, replace(case.fill([]), num_decode_reqs=0, max_query_len=512))
    for lens in ([(0, 512)], [(100, 1)] * 8, MIXED, [], [(0, 64)] * 8, [(900, 100), (5, 1)]):
        case.fill(lens)
        graph.replay()
        case.check()


def test_captured_uniform_batches_of_several_tokens() -> None:
    """As in speculative decoding."""
    case = Case(LAYERS["llama-8b"], 8, 32, 80, 600)
    graph = captured(case, replace(case.fill([]), num_decode_reqs=0, max_query_len=4))
    for lens in ([(100, 4)] * 8, [(1000, 4)], [(0, 4), (333, 4)]):
        case.fill(lens)
        graph.replay()
        case.check()


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gpt-oss", "gemma-2"])
def test_prepared_launches_equal_ordinary_ones(name: str) -> None:
    """Bitwise, and one preparation fits every batch of the bucket."""
    case = Case(LAYERS[name], 16, 400, 330, 1200)
    launch = TritonBackend().impl().prepare(case.call, case.kv_cache)
    for lens in (MIXED, DECODES, [(0, 400)], [(5000, 1)], [(30, 2), (40, 3)], [(10, 1)] * 16):
        common = case.fill(lens)
        metadata = case.builder.build(replace(common, num_reqs=len(lens)))
        launch(metadata)
        case.check()
        prepared = case.out.clone()
        case.out.fill_(float("nan"))
        case.forward(metadata)
        assert torch.equal(prepared.view(torch.int16), case.out.view(torch.int16))


@pytest.mark.parametrize("num_tokens", [16, 400], ids=["as few rows as may be all decode", "more"])
def test_nodes_of_a_graph_become_what_a_batch_takes(num_tokens: int) -> None:
    """Bitwise what ordinary launches give, whatever batch came before."""
    from piecegraph.compiler.torch_compat.versions import graph_exec_handle
    from piecegraph.runner.attention.triton.prepared import PreparedAttention

    case = Case(LAYERS["qwen3-0.6b"], 16, num_tokens, 330, 1200)
    prepare = TritonBackend().impl().prepare
    warm, launch = (prepare(case.call, case.kv_cache) for _ in range(2))
    assert isinstance(warm, PreparedAttention) and isinstance(launch, PreparedAttention)
    metadata = case.builder.build(replace(case.fill([(9, 1)]), num_reqs=1))
    warm(metadata)
    assert warm.unpatchable_reason() is None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        patch = launch.record(metadata)
    graph.instantiate()
    others = [MIXED, [(0, 400)]] if num_tokens == 400 else [[(30, 1), (70, 1), (0, 14)], [(20, 16)]]
    for lens in ([(10, 1)] * 16, others[0], [(5000, 1)], others[1], [(10, 1)] * 3, [(10, 2), (9, 1)]):
        metadata = case.builder.build(replace(case.fill(lens), num_reqs=len(lens)))
        patch(graph_exec_handle(graph), metadata)
        graph.replay()
        case.check()
        replayed = case.out.clone()
        case.out.fill_(float("nan"))
        case.forward(metadata)
        assert torch.equal(replayed.view(torch.int16), case.out.view(torch.int16))


def test_nothing_compiles_after_the_first_prepared_launch() -> None:
    """Whatever number of requests, of whatever lengths, comes next."""
    from triton import knobs

    case = Case(LAYERS["qwen3-0.6b"], 64, 256, 40, 2000)
    launch = TritonBackend().impl().prepare(case.call, case.kv_cache)
    launch(case.builder.build(replace(case.fill([(3, 1)]), num_reqs=1)))
    compiled: list[object] = []
    knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: compiled.append(kwargs)
    try:
        for lens in ([(9, 1)] * 64, [(9, 1)] * 17, [(0, 250)], [(9, 1), (30, 4)], [(30, 12)] * 3):
            launch(case.builder.build(replace(case.fill(lens), num_reqs=len(lens))))
            case.check()
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert not compiled


def test_many_launches_over_one_workspace_agree() -> None:
    """Bitwise: splits are added up in their order, whichever arrives last."""
    case = Case(LAYERS["qwen3-0.6b"], 4, 4, 520, 2100)
    metadata = case.builder.build(case.fill([(8000, 1), (4000, 1), (100, 1), (7000, 1)]))
    case.forward(metadata)
    first = case.out.clone()
    for _ in range(200):
        case.forward(metadata)
        assert torch.equal(case.out, first)
