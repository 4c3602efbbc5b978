"""What is explained is what `LLM` does, and needs neither weights nor the GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import LLM
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.config import CompileConfig
from piecegraph.errors import ConfigError, ModelNotFound, UnsupportedModel, UsageError
from piecegraph.runner.common.config_on_device import DEFAULT_COMPILE_SIZES
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.speculative_config import SpeculativeConfig
from piecegraph.runner.inspect.explanation import Explanation, explain
from piecegraph.runner.speculative.speculative_runner import SpeculativeRunner
from tests.runner.speculative.heads.random_heads import eagle3_checkpoint, save_head
from tests.runner.speculative.heads.test_mtp import mtp_model_config
from tests.runner.test_graphs import load
from tests.runner.tiny_models import FAMILIES, HYBRIDS, llama_config, make_config, random_model

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is assumed")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A folder that holds a config and nothing else."""
    folder = tmp_path_factory.mktemp("llama")
    llama_config().save_pretrained(str(folder))
    return EngineConfig(
        source=ModelSource(model=str(folder)),
        device="cpu",
        graph_kind="recorded",
        attention_backend="triton",
        cudagraph_capture_sizes=(1, 2, 4),
        max_num_seqs=6,
        max_num_batched_tokens=16,
        block_size=16,
    )


@pytest.fixture(scope="module")
def explained(config: EngineConfig) -> Explanation:
    return explain(config)


def test_decisions_are_those_of_llm(config: EngineConfig, explained: Explanation) -> None:
    """The same pieces, backend, modes, buckets, and costs of a replay."""
    with LLM(
        config.source.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        compiler="eager",
        device="cpu",
        graph_kind="recorded",
        attention_backend="triton",
        cudagraph_capture_sizes=[1, 2, 4],
        max_num_seqs=6,
        max_num_batched_tokens=16,
        num_kv_blocks=16,
    ) as llm:
        report = llm.compiled.report()
        for theirs, ours in zip(report.unique_pieces, explained.report.unique_pieces, strict=True):
            assert (theirs.shared_by, theirs.num_nodes) == (ours.shared_by, ours.num_nodes)
        assert explained.report.pieces == report.pieces
        graphs, resolved = llm.runner.graphs, llm.runner.dispatcher.resolved
        assert (explained.decode_mode, explained.mixed_mode) == (resolved.decode_mode, resolved.mixed_mode)
        assert explained.num_full == len(graphs.descriptors(FULL))
        assert explained.num_piecewise == len(graphs.descriptors(PIECEWISE))
        some = graphs.descriptors(PIECEWISE)[0]
        assert graphs.graphs[PIECEWISE].costs(some) == explained.replay_costs
        assert explained.max_model_len == llm.max_model_len


@pytest.fixture(scope="module")
def drafting(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """With a model of one layer that drafts, of which there is a config and nothing else, too."""
    folder = tmp_path_factory.mktemp("draft")
    llama_config(num_hidden_layers=1).save_pretrained(str(folder))
    speculative = SpeculativeConfig(method="draft_model", model=str(folder), num_speculative_tokens=3)
    return replace(config, speculative=speculative)


@pytest.mark.slow
def test_decisions_about_drafts_are_those_of_llm(drafting: EngineConfig) -> None:
    """The graphs of verifications and of the draft's passes, its pieces, and the memory of its layers."""
    found = explain(drafting)
    assert drafting.speculative is not None and found.draft is not None
    with LLM(
        drafting.source.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        compiler="eager",
        device="cpu",
        graph_kind="recorded",
        attention_backend="triton",
        cudagraph_capture_sizes=[1, 2, 4],
        max_num_seqs=6,
        max_num_batched_tokens=16,
        num_kv_blocks=16,
        speculative_config={"model": drafting.speculative.model, "num_speculative_tokens": 3},
    ) as llm:
        runner = llm.runner
        assert isinstance(runner, SpeculativeRunner) and runner.drafter is not None
        assert found.num_full == len(runner.graphs.descriptors(FULL)) == 6
        assert found.draft.num_full == len(runner.drafter.descriptors) == 3 and found.draft.num_piecewise == 0
        report = runner.drafter.compiled.report()
        assert found.draft.report.pieces == report.pieces and report.num_split_ops == 1
        caches = runner.step.kv_caches
        assert len(caches) == sum(row.layers for row in (*found.attention, *found.draft.attention)) == 3
    assert [(row.first, row.last, row.mode) for row in found.verification] == [(1, 1, FULL), (2, 2, FULL), (3, 4, FULL)]
    assert [(row.first, row.last, row.mode, row.num_tokens) for row in found.draft.decode][-2:] == [
        (3, 4, FULL, 8),
        (5, 6, NONE, None),
    ]
    assert found.drafting.startswith("draft_model (") and found.draft.drafting == "" and found.draft.mixed == ()
    ours = [path for path in found.slower_paths if path.startswith("draft model: ")]
    assert ours == [
        "draft model: dispatch: passes for 5 to 6 requests run NONE: 10 tokens are above the largest captured size 8 "
        "(FULL)"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_decisions_about_heads_are_those_of_llm(config: EngineConfig, tmp_path: Path, method: str) -> None:
    """Without weights: graphs of verifications and of the head's passes, its pieces, and the memory of its layers."""
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    model = config.source.model
    if method == "eagle3":
        written, _ = eagle3_checkpoint(random_model(llama_config()))
        drafts["model"] = str(save_head(tmp_path / "head", written, {}))
    else:
        model = str(tmp_path / "model")
        mtp_model_config("GLM-4.5").save_pretrained(model)
    speculative = SpeculativeConfig.parse(drafts)
    found = explain(replace(config, source=ModelSource(model=model, load_format="dummy"), speculative=speculative))
    assert found.draft is not None
    options: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4], "num_kv_blocks": 16, "block_size": 16}
    with load(Path(model), load_format="dummy", dtype="auto", speculative_config=drafts, **options) as llm:
        runner = llm.runner
        assert isinstance(runner, SpeculativeRunner) and runner.drafter is not None
        assert found.num_full == len(runner.graphs.descriptors(FULL)) == 6
        assert found.draft.num_full == len(runner.drafter.descriptors) == 3 and found.draft.num_piecewise == 0
        report = runner.drafter.compiled.report()
        assert found.draft.report.pieces == report.pieces and report.num_split_ops == 1
        assert len(runner.step.kv_caches) == sum(row.layers for row in (*found.attention, *found.draft.attention)) == 3
    assert [(row.first, row.last, row.mode, row.num_tokens) for row in found.draft.decode] == [
        (1, 1, FULL, 4),
        (2, 2, FULL, 8),
        (3, 4, FULL, 16),
        (5, 6, NONE, None),
    ]
    assert found.drafting.startswith(f"{method} (") and found.draft.drafting == "" and found.draft.mixed == ()
    assert any(path.startswith("head: dispatch: passes for 5 to 6 requests run NONE") for path in found.slower_paths)
    assert any(note.startswith("head: ") for note in found.notes)


def test_prompt_lookup_has_verifications_and_no_second_model(config: EngineConfig) -> None:
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3, stops_when_slower=False)
    found = explain(replace(config, speculative=speculative))
    assert found.drafting == "ngram (of 5 to 5 tokens), up to 3 tokens a request and step"
    assert found.draft is None and found.verification
    assert found.num_full == explain(config).num_full + len(found.verification)


def test_a_draft_that_llm_refuses_is_refused(config: EngineConfig, tmp_path: Path) -> None:
    """As is a draft model for a model with states, which prompt lookup can draft for."""
    llama_config(vocab_size=77).save_pretrained(str(tmp_path / "other"))
    speculative = SpeculativeConfig(method="draft_model", model=str(tmp_path / "other"), num_speculative_tokens=3)
    with pytest.raises(ConfigError, match="the draft model: .*a vocabulary of 77 tokens"):
        explain(replace(config, speculative=speculative))
    HYBRIDS["lfm2"]().save_pretrained(str(tmp_path / "hybrid"))
    hybrid = replace(config, source=ModelSource(model=str(tmp_path / "hybrid")))
    with pytest.raises(UnsupportedModel, match="keeps a state between tokens. The passes of a draft model"):
        explain(replace(hybrid, speculative=replace(speculative, model=str(tmp_path / "hybrid"))))


def test_the_model_is_described(explained: Explanation) -> None:
    (row,) = explained.attention
    assert (row.layers, row.num_q_heads, row.num_kv_heads, row.key_dim, row.window) == (2, 4, 2, 8, 0)
    assert explained.cache_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert (explained.model_class, explained.dtype, explained.is_assumed) == ("LlamaForCausalLM", torch.float32, False)


def test_every_downgrade_is_a_slower_path(explained: Explanation) -> None:
    """Graphs end at 4 tokens, and up to 6 requests and 16 tokens come."""
    decode, other = explained.slower_paths
    assert (
        decode == "dispatch: decode of 5 to 6 requests run NONE: 5 tokens are above the largest captured size 4 (FULL)"
    )
    assert other.startswith("dispatch: other batches of 5 to 16 tokens run NONE: 5 tokens are above the largest")


def test_without_a_gpu_that_is_the_reason_for_no_graphs(config: EngineConfig) -> None:
    explained = explain(replace(config, graph_kind="auto", compile_sizes=(1, 2)))
    assert (explained.decode_mode, explained.mixed_mode, explained.num_full) == (NONE, NONE, 0)
    (reason,) = explained.slower_paths
    assert reason.startswith("cudagraph_mode: NONE runs: there is no GPU")
    assert explained.compile_sizes == (1, 2)


def test_sdpa_is_launched_between_graphs(config: EngineConfig) -> None:
    explained = explain(replace(config, attention_backend="sdpa", max_num_seqs=4, max_num_batched_tokens=4))
    assert explained.replay_costs == {"graph": 3, "launch": 2}
    (full,) = explained.slower_paths
    assert "uniform decode runs PIECEWISE instead of FULL: attention backend 'sdpa'" in full


@NO_GPU
def test_a_gpu_is_assumed(config: EngineConfig) -> None:
    """Its defaults, its backend and its modes."""
    explained = explain(EngineConfig(source=config.source, max_num_seqs=100, max_model_len=64), assume_gpu=True)
    assert (explained.device.type, explained.is_assumed, explained.dtype) == ("cuda", True, torch.bfloat16)
    assert explained.backend == "triton"
    assert explained.backend_reasons[0].startswith("triton: reads the paged cache")
    assert explained.max_num_batched_tokens == 8192
    assert explained.compile_sizes == DEFAULT_COMPILE_SIZES
    assert (explained.decode_mode, explained.mixed_mode) == (FULL, PIECEWISE)
    assert (explained.decode[-1].first, explained.decode[-1].last, explained.decode[-1].num_tokens) == (97, 100, 100)
    assert explained.mixed[-1].num_tokens == 8192
    assert explained.slower_paths == ()


@NO_GPU
@pytest.mark.parametrize(("passes", "sizes"), [(None, ()), (("merge-projections",), DEFAULT_COMPILE_SIZES)])
def test_no_size_is_static_where_passes_leave_nothing_to_sum(
    passes: tuple[str, ...] | None, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    llama_config(hidden_size=128, intermediate_size=256, vocab_size=512).save_pretrained(str(tmp_path))
    config = EngineConfig(
        source=ModelSource(model=str(tmp_path)), max_model_len=64, compile=CompileConfig(passes=passes)
    )
    assert explain(config, assume_gpu=True).compile_sizes == sizes


@NO_GPU
def test_experts_are_fused_on_an_assumed_gpu(tmp_path: Path) -> None:
    """Transformers traces them otherwise there."""
    FAMILIES["qwen3-moe"]().save_pretrained(str(tmp_path))
    explained = explain(EngineConfig(source=ModelSource(model=str(tmp_path)), max_model_len=64), assume_gpu=True)
    (moe,) = (row for row in explained.report.passes if row.name == "fuse-moe")
    assert (moe.matches, moe.misses) == (2, ())


@NO_GPU
def test_an_assumed_gpu_can_lack_what_the_layers_need(tmp_path: Path) -> None:
    make_config("LlamaConfig", num_attention_heads=2, head_dim=512).save_pretrained(str(tmp_path))
    explained = explain(EngineConfig(source=ModelSource(model=str(tmp_path))), assume_gpu=True)
    assert explained.backend == "sdpa"
    assert any(reason.startswith("attention_backend: not triton:") for reason in explained.slower_paths)


@NO_GPU
def test_a_missing_device_is_refused(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="torch sees no NVIDIA GPU here. Assume one"):
        explain(replace(config, device="cuda"))
    with pytest.raises(UsageError, match="device='cpu' is not a GPU to assume"):
        explain(config, assume_gpu=True)


def test_a_config_that_llm_refuses_is_refused(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="strict=True allows no downgrade"):
        explain(replace(config, graph_kind="auto", strict=True))
    with pytest.raises(ConfigError, match="ends at 32"):
        explain(replace(config, cudagraph_capture_sizes=(32,)))
    with pytest.raises(ModelNotFound):
        explain(replace(config, source=ModelSource(model="./nowhere")))
