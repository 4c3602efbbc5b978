"""Models whose layers keep states: a state is resumed wherever a step, a chunk or a prefix ends, and no token shows it.

Here by torch, and by graphs that are recorded.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError, UnsupportedModel
from piecegraph.runner.attention.interface.kv_cache import LayerCache
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from tests.runner.margin_rule import assert_same_tokens, library_functions, with_functions
from tests.runner.test_graphs import load
from tests.runner.tiny_models import HYBRIDS, make_config, make_model, random_model, save

COMMON = [(7 * i + 3) % 97 + 5 for i in range(17)]
PROMPTS = [
    [*COMMON, *((11 * i + 1) % 89 + 4 for i in range(12))],
    [9],
    [*COMMON, *((5 * i + 2) % 83 + 4 for i in range(5))],
    [40, 41, 42],
    COMMON,
    [(13 * i + 6) % 101 + 5 for i in range(8)],
]
"""Of several chunks of 5 tokens, of one token, of whole blocks of 4; three share a prefix."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ONE_OF_EACH_KIND = list(HYBRIDS)[:4]
NUM_KINDS = {"qwen3.5": 2, "lfm2": 2, "bamba": 2, "jamba": 3}
"""The kinds of layers: attention and those with states; in Jamba also with experts or without."""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
ALWAYS = ("qwen3.5", "jamba")
"""Between them they have all three ops; the other models are slow tests."""


def load_hybrid(folder: Path, **options: Any) -> LLM:
    """Blocks of 4 tokens, chunks of 5, and too few blocks for all requests."""
    defaults = {
        "block_size": 4,
        "num_kv_blocks": 30,
        "max_model_len": 64,
        "max_num_batched_tokens": 5,
        "max_num_seqs": 4,
    }
    return LLM(
        folder,
        **{
            "dtype": "float32",
            "device": "cpu",
            "compiler": "eager",
            "compile_workers": 0,
            "skip_tokenizer_init": True,
            **defaults,
            **options,
        },
    )


def manager(llm: LLM) -> KVCacheManager:
    return llm.engine.scheduler._kv_cache


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check(model: PreTrainedModel, tokens: list[list[int]]) -> None:
    for prompt, ours in zip(PROMPTS, tokens, strict=True):
        assert_same_tokens(model, prompt, ours)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    model = make_model("qwen3.5")
    return model, save(model, tmp_path_factory.mktemp("qwen"))


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS]
)
def test_a_hybrid_answers_as_transformers_does(name: str, tmp_path: Path) -> None:
    """In chunks, preempted, and again with the states that the prefix cache kept. All blocks are free in the end.

    No function is called that would be a library's if one were installed, whose kernels take no tensors of a CPU.
    """
    model = make_model(name)
    functions = library_functions(model)
    assert functions or name not in ALWAYS
    refused = {function: Mock(side_effect=AssertionError(f"{function} was called")) for function in functions}
    with ExitStack() as held:
        with with_functions(model, refused):
            llm = held.enter_context(load_hybrid(save(model, tmp_path), num_kv_blocks=30 if name == "jamba" else 24))
            answers = [generate(llm) for _ in range(2)]
        for tokens in answers:
            check(model, tokens)
        stats = llm.engine.stats
        assert stats.num_prefix_hits > 0
        if not all(group.is_state for group in manager(llm).groups):  # states alone take no more memory as texts grow
            assert stats.num_preemptions > 0
        assert manager(llm).num_free_blocks == manager(llm).num_blocks
        assert any(group.is_state for group in manager(llm).groups)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [8, 2, 1])
def test_two_numbers_of_a_head_or_fewer_are_rotated(head_dim: int, tmp_path: Path) -> None:
    """With one KV head no dim but that of the tokens says where a number lies; steps of one token run, too."""
    config = HYBRIDS["qwen3.5"]().to_dict()
    config["rope_parameters"]["partial_rotary_factor"] = min(2 / head_dim, 1.0)
    config |= {"head_dim": head_dim, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = random_model(make_config("Qwen3_5TextConfig", **{k: v for k, v in config.items() if k != "model_type"}))
    with load_hybrid(save(model, tmp_path)) as llm:
        check(model, generate(llm))


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_inductor_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    """Equal layers share their pieces: a kind of layer adds few."""
    model = make_model(name)
    with load_hybrid(save(model, tmp_path), compiler="inductor") as llm:
        check(model, generate(llm))
        report = llm.compiled.report()
        assert report.num_unique_pieces <= 3 + NUM_KINDS[name] and not report.eager_pieces


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"async_scheduling": True}], ids=str)
def test_states_in_one_slot_and_a_step_ahead(qwen: tuple[PreTrainedModel, Path], options: dict[str, Any]) -> None:
    """Free blocks hold NaN before every step: no request reads what is not its own."""
    model, folder = qwen
    with load_hybrid(folder, num_kv_blocks=26, max_num_batched_tokens=7, **options) as llm:
        engine, pool = llm.engine, manager(llm).pool
        assert all(group.has_one_slot for group in manager(llm).groups if group.is_state) is (
            "async_scheduling" not in options
        )
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, GREEDY, is_final_only=True)
        tokens = {}
        while engine.has_unfinished:
            if "async_scheduling" not in options:
                free = [block for block in range(pool.num_blocks) if pool.is_free(block)]
                step = llm.runner.step
                caches: list[LayerCache] = [*step.kv_caches.values(), *step.state_caches.values()]
                for tensor in (tensor for cache in caches for tensor in cache.tensors):
                    tensor[free] = float("nan")
            tokens.update({output.request_id: list(output.outputs[0].token_ids) for output in engine.step()})
        assert engine.stats.num_preemptions > 0 and pool.num_free == pool.num_blocks
    check(model, [tokens[str(i)] for i in range(len(PROMPTS))])


def test_uniform_decode_batches_run_under_full_graphs(qwen: tuple[PreTrainedModel, Path]) -> None:
    """The blocks of the states are in the buffers of the block tables; padding leaves no state."""
    model, folder = qwen
    with load(folder, block_size=4, num_kv_blocks=64) as llm:
        for _ in range(2):
            check(model, generate(llm))
        ran = llm.runner.counters.by_mode()
        assert not llm.runner.graphs.failed()
        assert all(ran[mode] > 0 for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)), ran


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"speculative_config": DRAFTS}], ids=["plain", "drafts"])
@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_a_gpu_gives_the_same_tokens(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Decode batches, and those of drafts, are FULL graphs over the kernels of layers with states."""
    model = make_model(name)
    with load(save(model, tmp_path), device="cuda", block_size=4, num_kv_blocks=80, **options) as llm:
        for _ in range(2):
            check(model, generate(llm))
        assert llm.runner.counters.by_mode()[CUDAGraphMode.FULL] > 0 and not llm.runner.graphs.failed()


def test_equal_layers_share_their_pieces(qwen: tuple[PreTrainedModel, Path]) -> None:
    """At most one piece more than a model without states for each kind of layer; explain shows the groups."""
    _, folder = qwen
    explained = explain(
        EngineConfig(source=ModelSource(model=str(folder)), device="cpu", block_size=4, max_model_len=64)
    )
    assert explained.report.num_unique_pieces <= 3 + 2
    assert any(note.startswith("kv cache groups: 1 x full attention, 2 x state: 3 groups") for note in explained.notes)


@pytest.mark.slow
def test_depth_adds_no_pieces(tmp_path: Path) -> None:
    """As in Qwen3.5, of four layers one has attention: at most one piece more for each kind of layer."""
    counts = []
    for repeats in (2, 3):
        kinds = [*["linear_attention"] * 3, "full_attention"] * repeats
        config = make_config(
            "Qwen3_5TextConfig", num_hidden_layers=len(kinds), layer_types=kinds, head_dim=16, linear_key_head_dim=8,
            linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        )  # fmt: skip
        config.architectures = ["Qwen3_5ForCausalLM"]
        config.save_pretrained(str(tmp_path))
        source = ModelSource(model=str(tmp_path))
        counts.append(explain(EngineConfig(source=source, device="cpu", max_model_len=64)).report.num_unique_pieces)
    assert counts[0] == counts[1] <= 3 + 2


@pytest.mark.slow
def test_the_last_states_alone_are_cached(qwen: tuple[PreTrainedModel, Path]) -> None:
    """Tokens are the same. A prompt is found again if the answer after it, of 3 blocks, left its last states."""
    model, folder = qwen
    hits = {}
    for cached_states in (None, 4, 1):
        with load_hybrid(folder, num_kv_blocks=120, cached_states=cached_states) as llm:
            for _ in range(2):
                check(model, generate(llm))
            hits[cached_states] = llm.engine.stats.num_prefix_hits
            assert manager(llm).num_free_blocks == 120
    assert hits[1] == 0 < hits[4] < hits[None]


def test_states_are_cached_where_there_are_any(llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="cached_states=2, but no layer of LlamaForCausalLM keeps a state"):
        load_hybrid(llama_dir, cached_states=2)


def test_a_layer_that_differs_is_refused_by_name(qwen: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    """Whatever the model is called: a delta net with another activation is not the one that was checked."""
    model, _ = qwen
    config = type(model.config)(**{**model.config.to_dict(), "hidden_act": "gelu"})
    config.architectures = model.config.architectures
    config.save_pretrained(str(tmp_path))
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.linear_attn \(Qwen3_5GatedDeltaNet\) keeps a state"):
        load_hybrid(tmp_path, load_format="dummy")


@pytest.mark.slow
def test_prompt_embeddings_see_the_states(qwen: tuple[PreTrainedModel, Path]) -> None:
    """A prompt given as embeddings runs the model's own code around our layers."""
    model, folder = qwen
    prompt = PROMPTS[2]
    embeds = model.get_input_embeddings().weight[torch.tensor(prompt)].detach()  # type: ignore[index]
    with load_hybrid(folder, enable_prompt_embeds=True) as llm:
        (output,) = llm.generate([{"prompt_embeds": embeds}], GREEDY, use_tqdm=False)
    assert_same_tokens(model, prompt, output.outputs[0].token_ids)
