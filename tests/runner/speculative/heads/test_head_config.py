"""A head that cannot draft is refused by name before any weight is read, and its config has vLLM's meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM
from piecegraph.cache.store.store import Store
from piecegraph.compiler.plans.plan_store import PlanStore
from piecegraph.compiler.store.compile_cache import CompileCache
from piecegraph.compiler.tracing.signature import ExampleCall
from piecegraph.config import CompileConfig
from piecegraph.errors import CheckpointError, ConfigError, ModelError, ModelNotFound, PiecegraphError, UnsupportedModel
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.speculative_config import SpeculativeConfig
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.load import load_model
from piecegraph.runner.speculative.heads.head_config import MtpConfig, eagle3_config, mtp_config, with_head
from piecegraph.runner.speculative.heads.load_head import head_without_weights, load_eagle3, load_mtp
from piecegraph.tools.cli import main
from tests.runner.speculative.heads.random_heads import drafts_by_head, eagle3_checkpoint, save_eagle3, save_head
from tests.runner.speculative.heads.test_mtp import save_with_mtp
from tests.runner.speculative.test_drafter import drafter_of
from tests.runner.test_graphs import load
from tests.runner.tiny_models import llama_config

CHANGES: dict[str, tuple[dict[str, Any], type[PiecegraphError], str]] = {
    "another library's": ({"speculators_config": None}, ConfigError, "not a head in the format of the speculators"),
    "another kind": ({"speculators_model_type": "dflash"}, ConfigError, "a head of kind 'dflash'"),
    "no layers": ({"transformer_layer_config": 3}, ModelError, "no transformer_layer_config"),
    "other layers": ({"layer": {"model_type": "gpt2"}}, UnsupportedModel, "of model_type 'gpt2'"),
    "windows": ({"layer": {"layer_types": ["sliding_attention"]}}, UnsupportedModel, "have windows"),
    "another vocabulary": ({"layer": {"vocab_size": 128}}, ConfigError, "a vocabulary of 128 tokens .* one of 261"),
    "another model": ({"target_hidden_size": 64}, ConfigError, "hidden states of 64 numbers and the model's have 32"),
    "too many tokens": ({"draft_vocab_size": 300}, ConfigError, "from 1 to the model's 261"),
    "a deeper model": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, ConfigError, "ascend from 0 .* to 2"),
    "no numbers": ({"eagle_aux_hidden_state_layer_ids": ["a"]}, ConfigError, "a list of layers' numbers"),
}


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_head_without_weights_has_the_key_of_the_head(
    llama: PreTrainedModel, llama_dir: Path, tmp_path: Path, method: str
) -> None:
    """So that a start finds what was compiled ahead."""
    folder, head_dir = llama_dir, save_eagle3(llama, tmp_path / "head")
    if method == "mtp":
        folder = tmp_path / "model"
        save_with_mtp("GLM-4.5", folder)
    source, config = ModelSource(model=str(folder)), load_config(ModelSource(model=str(folder)))
    head = mtp_config(source, config) if method == "mtp" else eagle3_config(ModelSource(model=str(head_dir)), config)
    cpu = torch.device("cpu")
    target = load_model(source, config, dtype=torch.float32, device=cpu)
    read: Any = load_mtp if isinstance(head, MtpConfig) else load_eagle3
    keys = []
    for loaded in (read(head, target, seed=0).loaded, head_without_weights(head, config, torch.float32, cpu)):
        module, dims = loaded.forward_module(), loaded.dynamic_dims
        cache = CompileCache(Store.open(tmp_path / "cache", key_file=tmp_path / "own.key"), True)
        call = ExampleCall.of(module, loaded.example_inputs(cpu), {}, dims)
        plans = PlanStore.of(cache, module, call, CompileConfig())
        keys.append(plans.key)
        assert plans.key, plans.reason
    assert keys[0] == keys[1]


def write(folder: Path, llama: PreTrainedModel, changes: dict[str, Any]) -> Path:
    """A head with another config; its weights do not matter."""
    _, tensors = eagle3_checkpoint(llama)
    config, _ = eagle3_checkpoint(llama, layer=changes.get("layer", {}))
    config |= {name: value for name, value in changes.items() if name != "layer"}
    return save_head(folder, {name: value for name, value in config.items() if value is not None}, tensors)


@pytest.mark.parametrize(("changes", "error", "message"), list(CHANGES.values()), ids=list(CHANGES))
def test_a_head_that_does_not_fit_is_refused(
    llama: PreTrainedModel, tmp_path: Path, changes: dict[str, Any], error: type[PiecegraphError], message: str
) -> None:
    folder = write(tmp_path / "head", llama, changes)
    with pytest.raises(error, match=message):
        eagle3_config(ModelSource(model=str(folder)), llama.config)


def test_files_that_cannot_be_read_end_a_start_with_their_code(
    llama: PreTrainedModel, llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """3, and nothing has begun; no drafts at all, or more than are possible, are a mistake of usage."""
    missing, empty, truncated = tmp_path / "missing", tmp_path / "empty", tmp_path / "truncated"
    save_eagle3(llama, truncated)
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    empty.mkdir()
    (empty / "config.json").write_text("{")
    for folder, error, message in (
        (missing, ModelNotFound, "the head: no folder"),
        (empty, ModelError, "cannot be read as JSON"),
        (truncated, CheckpointError, "corrupt or truncated"),
    ):
        with pytest.raises(error, match=message):
            load(llama_dir, speculative_config=drafts_by_head(folder))
        config = json.dumps(drafts_by_head(folder))
        assert main(["run", str(llama_dir), "a", "--speculative", config, "--quiet", "--enforce-eager"]) == 3
    for count in (0, 65):
        config = json.dumps(drafts_by_head(truncated, num_speculative_tokens=count))
        assert main(["run", str(llama_dir), "a", "--speculative", config, "--quiet"]) in (2, 3)
    capsys.readouterr()


def test_hidden_states_are_those_of_vllm_by_default(llama: PreTrainedModel, tmp_path: Path) -> None:
    """Of layers 2, the middle and the last but two; they are named where these are the same."""
    folder = write(tmp_path, llama, {"eagle_aux_hidden_state_layer_ids": None})
    deep = llama_config(vocab_size=261, num_hidden_layers=16)
    config = EngineConfig(
        source=ModelSource(model="tiny"),
        speculative=SpeculativeConfig(method="eagle3", model=str(folder), num_speculative_tokens=2),
    )
    found, head = with_head(config, deep)
    assert head is not None and head.hidden_states == (2, 8, 13) == found.source.hidden_states
    assert with_head(EngineConfig(source=ModelSource(model="tiny")), deep)[1] is None
    with pytest.raises(ConfigError, match="the head: .*a model of 4 layers has no default"):
        with_head(config, llama_config(vocab_size=261, num_hidden_layers=4))


def bad_d2t(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][-1] = 261


def no_d2t(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["d2t"]


def no_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["norm.weight"]


def one_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["extra"] = torch.ones(1)


def another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = torch.ones(32, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bad_d2t, "not to different tokens of the model's 0 to 260"),
        (no_d2t, "has no tensor d2t"),
        (no_norm, "1 missing: norm.weight"),
        (one_more, "1 unexpected: extra"),
        (another_shape, r"1 of another shape: fc.weight \(checkpoint \(32, 32\), head \(32, 96\)\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    llama: PreTrainedModel, llama_dir: Path, tmp_path: Path, change: Any, message: str
) -> None:
    config, tensors = eagle3_checkpoint(llama, draft_vocab=20)
    change(tensors)
    with pytest.raises(CheckpointError, match=f"the head: .*{message}"):
        load(llama_dir, speculative_config=drafts_by_head(save_head(tmp_path, config, tensors)))


def test_a_head_shares_what_only_the_model_has(llama: PreTrainedModel, llama_dir: Path, tmp_path: Path) -> None:
    """And says so; it is closed with the model, and keeps its weights."""
    with load(llama_dir, speculative_config=drafts_by_head(save_eagle3(llama, tmp_path))) as llm:
        head: Any = drafter_of(llm).step.head  # type: ignore[attr-defined]  # a head's
        generator: Any = llm._generator
        model = generator.model.model
        assert head.embed_tokens.weight is model.get_input_embeddings().weight
        assert head.lm_head.weight is model.get_output_embeddings().weight
        assert any("embed_tokens.weight and lm_head.weight of the model itself" in note for note in llm.notes)
        with pytest.raises(PiecegraphError, match="read at the start only"):
            llm.reload_weights(draft_weights={})
        assert llm.reload_weights() == len(model.state_dict())
    assert isinstance(llm, LLM)
