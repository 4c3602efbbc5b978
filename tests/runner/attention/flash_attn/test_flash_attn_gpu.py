"""The flash_attn backend on a GPU, for each package that is installed, against the torch reference in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from piecegraph.runner.attention.flash_attn.backend import FlashAttnBackend
from piecegraph.runner.attention.flash_attn.choice import FlashAttnKernels, choose_kernels
from piecegraph.runner.attention.flash_attn.packages import Family, installed
from piecegraph.runner.attention.interface.backend import AttentionCGSupport
from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from tests.runner.attention.triton.test_backend_gpu import DECODES, LAYERS, MIXED, Case

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # warnings of the packages

CUDA = torch.device("cuda")
FA2, FA3, FA4, TRITON = Family.FA2, Family.FA3, Family.FA4, Family.TRITON

MIXES = {
    "fa2, 256": (FA2, FA2, 256),
    "fa3, 16": (FA3, FA3, 16),
    "fa4 and triton, 16": (FA4, TRITON, 16),
    "fa4 and triton, 32": (FA4, TRITON, 32),
    "fa4 and fa2, 256": (FA4, FA2, 256),
}
"""Prefill, decode, and tokens a page."""


@pytest.fixture(autouse=True)
def _exact_reference() -> Iterator[None]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.cuda.empty_cache()


class Flash:
    """A case in fixed buffers, and the backend with one mix of kernels."""

    def __init__(self, mix: str, layer: str, num_reqs: int, num_tokens: int, longest: int, cached: int) -> None:
        """`longest`: tokens a row of the block table holds; `cached`: tokens of all requests together."""
        prefill, decode, block_size = MIXES[mix]
        found = installed()
        for family in (prefill, decode):
            if found[family] is not None:
                pytest.skip(f"{family.value} is {found[family]}")
        only = {family: None if family in (prefill, decode, TRITON) else "not meant" for family in Family}
        kernels = choose_kernels(only, torch.cuda.get_device_capability(), [LAYERS[layer]], block_size)
        if isinstance(kernels, str) or (kernels.prefill, kernels.decode) != (prefill, decode):
            pytest.skip(f"not for this layer: {kernels}")
        num_blocks = cached // block_size + num_reqs + 3
        self.case = Case(
            LAYERS[layer], num_reqs, num_tokens, -(-longest // block_size), num_blocks, block_size=block_size
        )
        self.kernels: FlashAttnKernels = kernels
        backend = FlashAttnBackend(kernels)
        self.builder = backend.metadata_builder([self.case.layer], block_size, CUDA, max_num_reqs=num_reqs)
        self.impl = backend.impl()

    def forward(self, metadata: AttentionMetadata) -> None:
        self.impl.forward(self.case.call, self.case.kv_cache, metadata)

    def check(self) -> None:
        """Rows of padding may hold anything."""
        self.case.out[int(self.case.query_start_loc[-1]) :] = float("nan")
        self.case.check()

    def captured(self, common: AttentionMetadata) -> torch.cuda.CUDAGraph:
        metadata = self.builder.init_capture(common)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward(metadata)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.forward(metadata)
        self.builder.prepare_for_replay(metadata)
        return graph


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("mix", MIXES)
def test_decode(mix: str, layer: str) -> None:
    flash = Flash(mix, layer, 12, 12, 5300, 7000)
    common = flash.case.fill(DECODES)
    for num_decode_reqs in (len(DECODES), 12):  # a real batch; one padded with requests
        flash.case.out.fill_(float("nan"))
        batch = replace(common, num_reqs=num_decode_reqs, num_decode_reqs=num_decode_reqs)
        flash.forward(flash.builder.build(batch))
        flash.check()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("mix", MIXES)
def test_mixed(mix: str, layer: str) -> None:
    flash = Flash(mix, layer, 7, 400, 1300, 3200)
    flash.forward(flash.builder.build(flash.case.fill(MIXED)))
    flash.check()


@pytest.mark.parametrize("mix", MIXES)
def test_a_long_prompt_and_its_chunks(mix: str) -> None:
    flash = Flash(mix, "qwen3-0.6b", 3, 4096, 4352, 10_000)
    flash.forward(flash.builder.build(flash.case.fill([(0, 2048), (2000, 1024), (3000, 1000)])))
    flash.check()


@pytest.mark.parametrize("mix", MIXES)
def test_more_than_256_requests(mix: str) -> None:
    """flash-attn 4 then looks its tiles up by another kernel."""
    flash = Flash(mix, "qwen3-0.6b", 300, 1000, 512, 20_000)
    flash.forward(flash.builder.build(flash.case.fill([(40, 1)] * 100 + [(i % 50, 4) for i in range(200)])))
    flash.check()


@pytest.mark.parametrize("num_reqs", [1, 8, 64])
@pytest.mark.parametrize("mix", MIXES)
def test_a_captured_decode_fits_any_batch(mix: str, num_reqs: int) -> None:
    """Captured over padding alone, replayed over batches of other lengths, with and without padded requests."""
    flash = Flash(mix, "qwen3-0.6b", num_reqs, num_reqs, 8448, 1600 * num_reqs + 8448)
    graph = flash.captured(replace(flash.case.fill([]), num_decode_reqs=num_reqs, max_query_len=1))
    for lens in ([(8100, 1)], [(0, 1)], [(17, 1), (3000, 1)] * (num_reqs // 2), [], [(63, 1)] * num_reqs):
        flash.case.fill(lens)
        graph.replay()
        graph.replay()
        flash.check()


@pytest.mark.parametrize("layer", ["llama-8b", "gemma-2"])
@pytest.mark.parametrize("mix", MIXES)
def test_captured_uniform_batches_of_several_tokens(mix: str, layer: str) -> None:
    """As in speculative decoding."""
    flash = Flash(mix, layer, 8, 32, 1280, 9600)
    graph = flash.captured(replace(flash.case.fill([]), num_decode_reqs=0, max_query_len=4))
    for lens in ([(100, 4)] * 8, [(1000, 4)], [(0, 4), (333, 4)], []):
        flash.case.fill(lens)
        graph.replay()
        flash.check()


@pytest.mark.parametrize("layer", ["qwen3-0.6b", "gpt-oss"])
@pytest.mark.parametrize("mix", MIXES)
def test_a_captured_mixed_batch_fits_any_batch(mix: str, layer: str) -> None:
    """FULL for batches that are not uniform, where the kernels promise it."""
    flash = Flash(mix, layer, 8, 512, 1280, 9600)
    if flash.kernels.cudagraph_support is not AttentionCGSupport.ALWAYS:
        pytest.skip("not promised")
    graph = flash.captured(replace(flash.case.fill([]), num_decode_reqs=0, max_query_len=512))
    for lens in ([(0, 512)], [(100, 1)] * 8, MIXED, [], [(0, 64)] * 8, [(900, 100), (5, 1)]):
        flash.case.fill(lens)
        graph.replay()
        flash.check()


@pytest.mark.parametrize("layer", ["qwen3-0.6b", "gemma-2", "gpt-oss"])
@pytest.mark.parametrize("mix", MIXES)
def test_prepared_launches_equal_ordinary_ones(mix: str, layer: str) -> None:
    """Bitwise, and one preparation fits every batch of the bucket."""
    flash = Flash(mix, layer, 16, 400, 5300, 9000)
    case = flash.case
    launch = flash.impl.prepare(case.call, case.kv_cache)
    for lens in (MIXED, DECODES, [(0, 400)], [(5000, 1)], [(30, 2), (40, 3)], [(10, 1)] * 16):
        metadata = flash.builder.build(replace(case.fill(lens), num_reqs=len(lens)))
        launch(metadata)
        flash.check()
        prepared = case.out.clone()
        case.out.fill_(float("nan"))
        flash.forward(metadata)
        flash.check()
        assert torch.equal(prepared.view(torch.int16), case.out.view(torch.int16))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("block_size", [16, 256])
def test_what_is_chosen_was_tried_and_was_right(block_size: int, layer: str) -> None:
    """The choice over what is installed holds on this GPU: no kernel is passed over for failing."""
    backend, layers = FlashAttnBackend(), [LAYERS[layer]]
    chosen = choose_kernels(installed(), torch.cuda.get_device_capability(), layers, block_size)
    if isinstance(chosen, str):
        assert backend.unsupported_reason(layers, CUDA, block_size) == chosen
        return
    assert backend.unsupported_reason(layers, CUDA, block_size) is None
    assert backend.fitted(layers, CUDA, block_size).notes == chosen.notes
