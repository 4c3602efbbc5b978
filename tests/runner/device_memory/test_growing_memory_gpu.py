"""A cache that grows on a GPU: addresses, contents, graphs over it, and how much of the memory it takes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import LLM, SamplingParams
from piecegraph.errors import OutOfMemory
from piecegraph.progress import Phase
from piecegraph.runner.device_memory.cuda_memory import CudaMemoryDriver
from piecegraph.runner.device_memory.growing_memory import GrowingMemory
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.tiny_models import llama_config, random_model, save

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose cache is large: 128 KiB a block, of which a tensor's first piece of memory holds 64."""
    config = llama_config(
        vocab_size=261, eos_token_id=1, head_dim=256, num_key_value_heads=4, max_position_embeddings=32_768
    )
    folder = save(random_model(config), tmp_path_factory.mktemp("wide"))
    byte_tokenizer().save_pretrained(str(folder))
    return folder


def used_bytes() -> int:
    """Return the bytes of the device in use by all processes."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


def test_growing_keeps_addresses_and_contents() -> None:
    device = torch.device("cuda")
    memory = GrowingMemory(CudaMemoryDriver(device))
    tensors = [memory.empty((4096, 16, 8, 64), dtype=torch.bfloat16, device=device) for _ in range(3)]
    first = memory.num_blocks
    assert 1 <= first < 4096
    for number, tensor in enumerate(tensors):
        tensor[:first] = number + 1
    addresses = [tensor.data_ptr() for tensor in tensors]
    for num_blocks in (first + 1, 1000, 4096):
        memory.grow(num_blocks)
        assert memory.num_blocks >= num_blocks
        for number, tensor in enumerate(tensors):
            tensor[first:num_blocks] = -number
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    for number, tensor in enumerate(tensors):
        assert tensor[:first].unique().tolist() == [number + 1]
        assert tensor[first:].unique().tolist() == [-number]


def test_a_graph_captured_before_reaches_what_was_added_after() -> None:
    device = torch.device("cuda")
    memory = GrowingMemory(CudaMemoryDriver(device))
    cache = memory.empty((8192, 1024), dtype=torch.float32, device=device)
    rows, values = torch.zeros(4, dtype=torch.int64, device=device), torch.zeros(4, 1024, device=device)
    cache.index_copy_(0, rows, values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.index_copy_(0, rows, values)
    memory.grow(8192)
    rows.copy_(torch.tensor([0, 700, 5000, 8191]))
    values.copy_(torch.arange(4.0).unsqueeze(1).expand(4, 1024))
    graph.replay()
    assert cache[rows].mean(1).tolist() == [0, 1, 2, 3]


def test_close_gives_the_memory_back() -> None:
    device = torch.device("cuda")
    memory = GrowingMemory(CudaMemoryDriver(device))
    before = used_bytes()
    tensor = memory.empty((1024, MIB), dtype=torch.uint8, device=device)
    memory.grow(1024)
    assert abs(used_bytes() - before - 1024 * MIB) <= 8 * MIB
    del tensor
    memory.close()
    assert abs(used_bytes() - before) <= 8 * MIB


def test_the_last_tensor_gives_the_memory_back() -> None:
    device = torch.device("cuda")
    before = used_bytes()
    tensor = GrowingMemory(CudaMemoryDriver(device)).empty((4, 64 * MIB), dtype=torch.uint8, device=device)
    view = tensor[0, :5]
    del tensor
    view.fill_(7)
    assert view.tolist() == [7] * 5 and used_bytes() - before >= 64 * MIB
    del view
    assert abs(used_bytes() - before) <= 8 * MIB


def test_too_little_memory_changes_nothing() -> None:
    device = torch.device("cuda")
    memory = GrowingMemory(CudaMemoryDriver(device))
    total_bytes = torch.cuda.mem_get_info()[1]
    num_blocks = total_bytes * 2 // 3 // MIB
    tensors = [memory.empty((num_blocks, MIB), dtype=torch.uint8, device=device) for _ in range(2)]
    for tensor in tensors:
        tensor[0] = 5
    before = used_bytes()
    with pytest.raises(OutOfMemory, match="and the GPU ran out after"):
        memory.grow(num_blocks)
    assert abs(used_bytes() - before) <= 8 * MIB
    assert all(tensor[0].unique().tolist() == [5] for tensor in tensors)


def test_an_llm_fills_what_is_left(wide_dir: Path) -> None:
    """With the largest step running, the memory in use is within 2 % of the target."""
    utilization = 0.3
    phases: list[Phase] = []
    before = used_bytes()
    with LLM(
        wide_dir,
        dtype="bfloat16",
        gpu_memory_utilization=utilization,
        max_num_seqs=512,  # requests of 4 GiB each
        max_num_batched_tokens=512,
        cudagraph_capture_sizes=(1, 8, 64),
        on_phase=phases.append,
    ) as llm:
        total_bytes = torch.cuda.mem_get_info()[1]
        target = int(utilization * total_bytes)
        (detail,) = [phase.detail for phase in phases if phase.name == "kv_cache"]
        num_blocks = llm.engine.stats.num_blocks
        assert detail.startswith(f"{num_blocks} blocks of 16 tokens")
        assert "GiB of graphs leaves" in detail
        used = used_bytes()
        assert used <= target, detail
        assert target - used <= 0.02 * target + step_bytes(detail), detail
        output = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        assert len(output[0].outputs[0].token_ids) >= 1
    del llm, output
    assert used_bytes() - before <= 0.01 * total_bytes


def step_bytes(detail: str) -> float:
    """Return the bytes of the largest step in the budget's text."""
    return float(detail.split(" GiB for the largest step")[0].rsplit(" ", 1)[1]) * 2**30


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_answers_are_those_of_a_fixed_cache(wide_dir: Path, compiler: str) -> None:
    """Through blocks that had no memory when the graphs were captured."""
    prompts = [f"{number} " + "abcdefgh" * (3 + number) for number in range(24)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    sizes: list[dict[str, Any]] = [{"gpu_memory_utilization": 0.2}, {"num_kv_blocks": 5000}]
    for size in sizes:
        with LLM(
            wide_dir, dtype="bfloat16", compiler=compiler, max_num_seqs=32, max_num_batched_tokens=1024,
            cudagraph_capture_sizes=(1, 8, 32, 256), enable_prefix_caching=False, **size,
        ) as llm:  # fmt: skip
            caches = llm.runner.step.kv_caches.values()
            assert {layer.key.shape[0] for layer in caches} == {llm.engine.stats.num_blocks}
            for layer in caches:  # all of it can be written
                layer.key.fill_(float("nan"))
                layer.value.fill_(float("nan"))
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


def test_too_little_for_one_request(llama_dir: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"gpu_memory_utilization=1e-06 of .* leaves -"):
        LLM(llama_dir, gpu_memory_utilization=1e-6, enforce_eager=True)
