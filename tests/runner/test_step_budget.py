"""The budgets of a decode step, a layer and a start, counted and not timed: a costlier change fails here.

On a CPU by graphs that are recorded, whose rules are those of CUDA graphs; the `gpu` tests count with torch's profiler.
Whoever lowers a figure lowers it here too. Whoever raises one says in the commit what for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from piecegraph import LLM, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.compiler.graphs.recording.recorder import FunctionRecorder
from piecegraph.compiler.piece_compilers.eager import EagerPieceCompiler
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.engine.engine import Engine
from piecegraph.runner.inspect.explanation import explain
from piecegraph.tools.bench.host_step import decoding_engine
from piecegraph.tools.command_line.shapes import model_folder
from tests.runner.step_counts import StepCounts, counted, step_memory
from tests.runner.test_graphs import SIZES, load
from tests.runner.tiny_models import llama_config

BLOCK_SIZE = 16
STEADY_STEPS = 8
"""Steps in which no request gets a block: from the first token of one on, with room for what is in flight."""


def decode_steadily(engine: Engine, num_reqs: int, *, max_tokens: int = 40) -> None:
    """`num_reqs` greedy requests that all decode, each near the beginning of its second block."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for i in range(num_reqs):
        engine.add_request(str(i), [4 + i] * (BLOCK_SIZE + 1), params, is_final_only=True)
    while any(len(request.output_token_ids) < 2 for request in engine.requests.values()):
        engine.step()
    engine.step()
    computed = [request.num_computed_tokens for request in engine.requests.values()]
    assert max(computed) + STEADY_STEPS < 2 * BLOCK_SIZE, f"some would get blocks in the steps counted: {computed}"


def finish(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


def counts_of_steps(engine: Engine, num_steps: int) -> list[StepCounts]:
    found = []
    for _ in range(num_steps):
        with counted() as counts:
            engine.step()
        found.append(counts)
    return found


@pytest.fixture(scope="module")
def recorded(llama_dir: Path) -> Iterator[LLM]:
    with load(llama_dir, max_num_batched_tokens=128) as llm:
        yield llm


@pytest.mark.parametrize("num_reqs", [1, 6])
def test_a_steady_decode_step_is_one_graph_and_one_copy(recorded: LLM, num_reqs: int) -> None:
    """Nothing comes from the host, nothing is allocated, and nothing grows with the batch. The copy is of the tokens:
    on a GPU it runs beside the next step."""
    before = recorded.runner.counters.by_mode().get(CUDAGraphMode.FULL, 0)
    decode_steadily(recorded.engine, num_reqs)
    for counts in counts_of_steps(recorded.engine, STEADY_STEPS):
        assert counts.graphs == 1
        assert counts.writes == {"aten.copy_.default": 1}
        assert not counts.allocations
        assert (counts.staged_writes, counts.host_bytes) == (0, 0)
        assert sum(counts.views.values()) <= 1
    finish(recorded.engine)
    assert recorded.runner.counters.by_mode()[CUDAGraphMode.FULL] >= before + STEADY_STEPS


def test_a_step_in_which_requests_get_blocks_costs_one_kernel_more(recorded: LLM) -> None:
    """However many get one, and four words of the host's for each: a row, a place in it, an end, the block."""
    decode_steadily(recorded.engine, 6)
    with_blocks = [counts for counts in counts_of_steps(recorded.engine, 2 * BLOCK_SIZE - 4) if counts.staged_writes]
    finish(recorded.engine)
    assert with_blocks
    for counts in with_blocks:
        assert (counts.graphs, counts.staged_writes) == (1, 1)
        assert counts.host_bytes <= 4 * 4 * 6 + 12  # the contents begin at a boundary of 16 bytes
        assert counts.launches == 3
        assert not counts.allocations


def test_a_piecewise_step_launches_its_plan_and_no_more(llama_dir: Path) -> None:
    """A graph a segment of pieces, a launch a layer between them; the step's metadata are views."""
    with load(llama_dir, max_num_batched_tokens=128, cudagraph_mode="PIECEWISE") as llm:
        graphs = llm.runner.graphs.graphs[CUDAGraphMode.PIECEWISE]
        num_layers = len(llm.compiled.split_calls)
        for descriptor in graphs.descriptors:
            assert graphs.costs(descriptor) == {"graph": num_layers + 1, "launch": num_layers}
        decode_steadily(llm.engine, 6)
        for counts in counts_of_steps(llm.engine, STEADY_STEPS):
            assert (counts.graphs, counts.staged_writes, counts.host_bytes) == (1, 0, 0)
            assert counts.writes == {"aten.copy_.default": 1}
            assert not counts.allocations
            assert sum(counts.views.values()) <= 7


@pytest.mark.parametrize("num_reqs", [1, 64])
def test_the_host_allocates_little_in_a_step_and_keeps_the_tokens_alone(num_reqs: int) -> None:
    """Bytes of Python objects, as they are without a device's: a number and a place in a list for each token."""
    engine, _ = decoding_engine(num_reqs, num_steps=100)
    for _ in range(20):
        engine.step()
    memory = step_memory(engine.step, 32)
    assert memory.transient <= 2048 + 64 * num_reqs
    assert memory.kept <= 1024 + 64 * num_reqs


def start_counts(folder: Path, **options: Any) -> tuple[Counter[str], LLM]:
    """Pieces compiled and functions recorded by a start, and what was started."""
    counts: Counter[str] = Counter()
    compile_pieces, record = EagerPieceCompiler.compile, FunctionRecorder.record

    def counted_compile(self: Any, unique: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        counts["compiled"] += len(unique)
        return compile_pieces(self, unique, *args, **kwargs)

    def counted_record(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["recorded"] += 1
        return record(self, *args, **kwargs)

    with (
        patch.object(EagerPieceCompiler, "compile", counted_compile),
        patch.object(FunctionRecorder, "record", counted_record),
    ):
        llm = load(folder, load_format="dummy", **options)
        at_start = counts.copy()
        prompts = [{"prompt_token_ids": [5] * length} for length in (3, 20, 7)]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert counts == at_start, "something was compiled or captured while serving"
    return at_start, llm


@pytest.mark.parametrize("num_layers", [3, 6])
def test_a_start_compiles_three_pieces_and_captures_each_bucket_once(num_layers: int, tmp_path: Path) -> None:
    """Compiles are flat in depth: before the first attention, between two, after the last. A FULL bucket is one
    recording, a PIECEWISE one a segment of pieces each."""
    llama_config(num_hidden_layers=num_layers).save_pretrained(str(tmp_path))
    counts, llm = start_counts(tmp_path)
    with llm:
        report = llm.compiled.report()
        assert (report.num_pieces, report.num_unique_pieces) == (num_layers + 1, 3)
        assert counts["compiled"] == 3
        assert [row.shared_by for row in report.unique_pieces] == [1, num_layers - 1, 1]
        captured = {mode: len(graphs.descriptors) for mode, graphs in llm.runner.graphs.graphs.items()}
        assert captured == {CUDAGraphMode.PIECEWISE: len(SIZES), CUDAGraphMode.FULL: 4}  # 1, 2, 4 and 6 requests
        assert counts["recorded"] == len(SIZES) * (num_layers + 1) + 4


@dataclass(frozen=True)
class LayerBudget:
    launches: int  # norms, linears, attention, activations
    left_to_inductor: int  # operations it may make kernels of, or none


LAYERS = {
    "shape:qwen3-0.6b:3": LayerBudget(launches=7, left_to_inductor=0),
    "shape:llama-8b:3": LayerBudget(launches=7, left_to_inductor=0),
}
"""The number of kernels of a layer with the passes of a GPU and our attention."""


@pytest.mark.parametrize("shape", LAYERS)
def test_a_layer_launches_as_many_kernels_as_the_passes_leave(shape: str, tmp_path: Path) -> None:
    """Count the kernels as `explain` does."""
    config = EngineConfig(
        source=ModelSource(model=model_folder(shape, tmp_path)), attention_backend="triton", max_model_len=256
    )
    layer = explain(config, assume_gpu=not torch.cuda.is_available()).layer
    assert layer is not None
    assert layer.launches == LAYERS[shape].launches
    assert layer.left_to_inductor <= LAYERS[shape].left_to_inductor


KERNELS_OF_A_PIECE = 16
"""The largest number of kernels that Inductor may write for a layer of a small Llama on a CPU, besides matmuls of
libraries. It writes 14."""


def test_inductor_fuses_what_is_between_the_matmuls_of_a_layer(tmp_path: Path) -> None:
    llama_config(num_hidden_layers=3).save_pretrained(str(tmp_path))
    options = {"compiler": "inductor", "cudagraph_mode": "NONE", "compile_workers": 0, "device": "cpu"}
    with load(tmp_path, load_format="dummy", **options) as llm:
        (middle,) = [row for row in llm.compiled.report().unique_pieces if row.shared_by > 1]
        assert middle.kernels is not None
        assert 0 < middle.kernels <= KERNELS_OF_A_PIECE


@pytest.fixture(scope="module")
def on_gpu(llama_dir: Path) -> Iterator[LLM]:
    """Some requests of any kind have run: what is made on first use is made."""
    with load(llama_dir, device="cuda", dtype="bfloat16", max_num_batched_tokens=128, num_kv_blocks=64) as llm:
        decode_steadily(llm.engine, 6)
        while llm.engine.has_unfinished:
            llm.engine.step()
        yield llm


def profiled_steps(engine: Engine, num_steps: int) -> Counter[str]:
    """Events of torch's profiler while `num_steps` steps run, by name."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities):  # the first of a process is slow to start
        torch.cuda.synchronize()
    torch.cuda.synchronize()
    with profile(activities=activities) as profiled:
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
    return Counter(event.name for event in profiled.events() or [])


def named(events: Counter[str], *starts: str) -> int:
    return sum(count for name, count in events.items() if name.startswith(starts))


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [1, 6])
def test_a_steady_decode_step_is_one_graph_launch_on_a_gpu(on_gpu: LLM, num_reqs: int) -> None:
    """A step launches no kernel beside the graph, and copies no byte from the host."""
    decode_steadily(on_gpu.engine, num_reqs)
    events = profiled_steps(on_gpu.engine, STEADY_STEPS)
    assert named(events, "cudaGraphLaunch", "cuGraphLaunch") == STEADY_STEPS, events
    assert named(events, "cudaLaunchKernel", "cuLaunchKernel") == 0, events
    assert named(events, "Memcpy HtoD") == 0, events
    assert named(events, "Memcpy DtoH") <= STEADY_STEPS, events
    finish(on_gpu.engine)


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [1, 6])
def test_a_steady_decode_step_allocates_nothing_on_a_gpu(on_gpu: LLM, num_reqs: int) -> None:
    """Neither a block of the caching allocator's nor memory of the device's."""
    decode_steadily(on_gpu.engine, num_reqs)
    names = ("allocation.all.allocated", "segment.all.allocated")
    before = torch.cuda.memory_stats()
    for _ in range(STEADY_STEPS):
        on_gpu.engine.step()
    after = torch.cuda.memory_stats()
    assert {name: after[name] - before[name] for name in names} == dict.fromkeys(names, 0)
    finish(on_gpu.engine)
