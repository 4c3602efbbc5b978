"""Layers with windows keep their windows and nothing else, and no token shows it.

Here by graphs that are recorded and by torch references; the `gpu` tests run the same with CUDA graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.attention.sdpa import SdpaBackend
from piecegraph.runner.attention.triton.backend import TritonBackend
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.scheduling.kv_cache_manager import UNREAD_BLOCK, KVCacheManager
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.test_graphs import load
from tests.runner.tiny_models import make_config, make_model, random_model, save

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BLOCK_SIZE = 4
COMMON = [(7 * i + 3) % 97 + 5 for i in range(24)]
PROMPTS = [
    [*COMMON, *((11 * i + 1) % 89 + 4 for i in range(21))],
    [*COMMON, *((5 * i + 2) % 83 + 4 for i in range(9))],
    [40, 41, 42],
    [(13 * i + 6) % 101 + 5 for i in range(52)],
]
"""Three of them many times as long as the windows, of 8 tokens; two share a prefix."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
NUM_GROUPS = {"mistral": 1, "gemma2": 2, "gemma3": 3, "gpt-oss": 2, "gemma3-deep": 3}
SLOW = pytest.mark.slow
BACKENDS = [
    pytest.param({"attention_backend": "triton"}, id="triton"),
    pytest.param({"attention_backend": "sdpa"}, id="sdpa"),
    pytest.param({"attention_backend": "triton", "device": "cuda"}, id="cuda", marks=pytest.mark.gpu),
]


def make(name: str) -> PreTrainedModel:
    if name != "gemma3-deep":
        return make_model(name)
    layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return random_model(
        make_config(
            "Gemma3TextConfig", head_dim=16, query_pre_attn_scalar=16, sliding_window=8, num_hidden_layers=6,
            layer_types=layer_types,
        )
    )  # fmt: skip


@pytest.fixture(
    scope="module",
    params=["mistral", "gpt-oss", *(pytest.param(name, marks=SLOW) for name in ("gemma2", "gemma3", "gemma3-deep"))],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    model = make(request.param)
    return model, save(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    model = make("gemma3")
    return model, save(model, tmp_path_factory.mktemp("gemma3"))


def load_windowed(folder: Path, **options: Any) -> LLM:
    return load(folder, **{"block_size": BLOCK_SIZE, "num_kv_blocks": 160, "max_model_len": 96, **options})


def manager(llm: LLM) -> KVCacheManager:
    return llm.engine.scheduler._kv_cache


def generate(llm: LLM, at_most: CUDAGraphMode = FULL) -> list[list[int]]:
    """Greedy tokens of `PROMPTS` with no mode above `at_most`."""
    runner = llm.runner
    execute = runner.execute_model
    try:
        runner.execute_model = lambda step: execute(step, at_most=at_most)  # type: ignore[method-assign, assignment, misc]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    finally:
        runner.execute_model = execute  # type: ignore[method-assign]
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_tokens(model: PreTrainedModel, tokens: list[list[int]]) -> None:
    for prompt, ours in zip(PROMPTS, tokens, strict=True):
        assert_same_tokens(model, prompt, ours)


@pytest.mark.parametrize("options", BACKENDS)
def test_tokens_equal_those_of_transformers(family: tuple[PreTrainedModel, Path], options: dict[str, Any]) -> None:
    """In every mode, in chunks of 16 tokens at most, and again with what the prefix cache kept. All blocks are free
    in the end."""
    model, folder = family
    with load_windowed(folder, **options) as llm:
        step = llm.runner.step
        assert len(step.layout.groups) == NUM_GROUPS[folder.name[:-1]]
        assert len({cache.key.data_ptr() for cache in step.kv_caches.values()}) == len(step.layout.tensors)
        for mode in (FULL, PIECEWISE, NONE):
            check_tokens(model, generate(llm, mode))
        assert llm.engine.stats.num_prefix_hits >= 2 * sum(len(prompt) // 8 for prompt in PROMPTS)
        assert manager(llm).num_free_blocks == manager(llm).num_blocks
        ran = {mode for mode, count in llm.runner.counters.by_mode().items() if count}
        if llm.runner.graphs.failed():  # transformers' gpt-oss experts, uncompiled, wait for the GPU
            assert (folder.name[:-1], options.get("device")) == ("gpt-oss", "cuda") and NONE in ran
        else:
            assert ran == ({PIECEWISE, NONE} if options["attention_backend"] == "sdpa" else {FULL, PIECEWISE, NONE})


def poison(llm: LLM, blocks: list[int]) -> None:
    """NaN into these blocks, in all layers."""
    for cache in llm.runner.step.kv_caches.values():
        cache.key[blocks] = cache.value[blocks] = float("nan")


@pytest.mark.parametrize("options", [*BACKENDS, pytest.param({"async_scheduling": True}, id="a step ahead")])
def test_freed_blocks_are_never_read(family: tuple[PreTrainedModel, Path], options: dict[str, Any]) -> None:
    """Tables go on naming them: whatever is there, tokens are the same."""
    model, folder = family
    with load_windowed(folder, enable_prefix_caching=False, num_kv_blocks=120, **options) as llm:
        engine = llm.engine
        pool = manager(llm).pool
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, GREEDY, is_final_only=True)
        tokens, num_passed = {}, 0
        while engine.has_unfinished:
            poison(llm, [block for block in range(pool.num_blocks) if pool.is_free(block)])
            tokens.update({output.request_id: list(output.outputs[0].token_ids) for output in engine.step()})
            num_passed = max([num_passed, *(sum(one.num_passed) for one in manager(llm)._holdings.values())])
        assert num_passed > 10
        check_tokens(model, [tokens[str(i)] for i in range(len(PROMPTS))])


@pytest.mark.parametrize("options", BACKENDS)
def test_a_cached_prefix_is_read_in_its_windows_only(
    gemma3: tuple[PreTrainedModel, Path], options: dict[str, Any]
) -> None:
    """A hit brings no block from before its windows: entries there say 0, and that block is somebody else's."""
    model, folder = gemma3
    prompt = PROMPTS[3]
    with load_windowed(folder, **options) as llm:
        engine = llm.engine
        engine.add_request("first", prompt, GREEDY)
        while engine.has_unfinished:
            engine.step()
        engine.add_request("again", prompt, GREEDY, is_final_only=True)
        hit = manager(llm).find_prefix(engine.requests["again"])
        assert hit.num_tokens == 48
        assert sorted(table.count(None) for table in hit.tables) == [0, 10, 10]
        needed = {block for table in hit.tables for block in table if block is not None}
        assert UNREAD_BLOCK not in needed
        poison(llm, [block for block in range(manager(llm).num_blocks) if block not in needed])
        tokens: list[int] = []
        while engine.has_unfinished:
            for output in engine.step():
                tokens += output.outputs[0].token_ids
    assert_same_tokens(model, prompt, tokens)


@pytest.mark.parametrize(
    ("name", "num_kv_blocks"),
    [("mistral", 14), ("gemma3", 60)],  # layers of one group; and two groups with windows beside one without
)
@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_a_pool_that_holds_windows_only(name: str, num_kv_blocks: int, backend: str, tmp_path: Path) -> None:
    """Two long requests run side by side where without freeing they would not fit: nobody is preempted."""
    model = make(name)
    prompts = PROMPTS[0], PROMPTS[3]
    with load_windowed(
        save(model, tmp_path),
        num_kv_blocks=num_kv_blocks,
        attention_backend=backend,
        enable_prefix_caching=False,
        max_model_len=72,
        max_num_seqs=2,
        max_num_batched_tokens=16,
    ) as llm:
        num_groups = len(llm.runner.step.layout.groups)
        kept = sum(-(-(len(prompt) + 14) // BLOCK_SIZE) * num_groups for prompt in prompts)
        assert kept > 1.5 * num_kv_blocks
        for i, prompt in enumerate(prompts):
            llm.engine.add_request(str(i), prompt, GREEDY, is_final_only=True)
        tokens, side_by_side = {}, 0
        while llm.engine.has_unfinished:
            tokens.update({output.request_id: list(output.outputs[0].token_ids) for output in llm.engine.step()})
            side_by_side += llm.engine.stats.num_running == 2
        assert side_by_side >= 10 and llm.engine.stats.num_preemptions == 0
        assert manager(llm).num_free_blocks == num_kv_blocks
    for i, prompt in enumerate(prompts):
        assert_same_tokens(model, prompt, tokens[str(i)])


@pytest.mark.parametrize("backend", [TritonBackend, SdpaBackend])
def test_blocks_of_several_kernel_pages(
    gemma3: tuple[PreTrainedModel, Path],
    backend: type[TritonBackend] | type[SdpaBackend],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of 4 tokens are allocated and freed, and kernels see blocks of 2."""
    model, folder = gemma3
    monkeypatch.setattr(backend, "kernel_block_size", lambda self, block_size: block_size // 2)
    with load_windowed(folder, attention_backend=backend.name, num_kv_blocks=120) as llm:
        assert manager(llm).block_size == 4 and llm.runner.step.block_size == 2
        cache = next(iter(llm.runner.step.kv_caches.values()))
        assert cache.key.shape[:2] == (2 * 120, 2)
        for _ in range(2):
            check_tokens(model, generate(llm))
        assert llm.engine.stats.num_prefix_hits > 0


def test_a_preempted_request_comes_back_with_its_windows(gemma3: tuple[PreTrainedModel, Path]) -> None:
    model, folder = gemma3
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [[10 + i, 20 + i, 30 + i] for i in range(4)]
    with load_windowed(folder, num_kv_blocks=40, max_model_len=72, max_num_seqs=4) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert llm.engine.stats.num_preemptions > 0
        assert manager(llm).num_free_blocks == 40
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)


@pytest.mark.slow
def test_notes_and_explain_show_the_groups(gemma3: tuple[PreTrainedModel, Path]) -> None:
    _, folder = gemma3
    note = (
        "kv cache groups: 2 x window of 8 tokens, 1 x full attention: 3 groups of up to 1 layers; while it decodes, a "
        "request of 96 tokens takes 42% of the memory that one group would"
    )
    with load_windowed(folder) as llm:
        assert note in llm.notes
    source = ModelSource(model=str(folder))
    assert note in explain(EngineConfig(source=source, device="cpu", block_size=4, max_model_len=96)).notes
