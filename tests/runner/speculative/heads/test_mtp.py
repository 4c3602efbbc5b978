"""A model's own layer for multi-token prediction drafts as it is defined, and changes no answer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from piecegraph import SamplingParams
from piecegraph.errors import CheckpointError, ConfigError, PiecegraphError, UnsupportedModel
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.speculative.heads.head_config import mtp_config
from piecegraph.runner.speculative.heads.head_step import HeadStep
from tests.runner.speculative.drafting_llm import FEW, SIZES
from tests.runner.speculative.heads.test_head_step import TEXT, drafts_of_whole_text
from tests.runner.speculative.test_drafter import drafter_of, speculation
from tests.runner.test_graphs import load
from tests.runner.tiny_models import make_config, random_model, save

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
MOE: dict[str, Any] = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
MOE |= {"n_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "GLM-4.5": ("Glm4MoeConfig", {**MOE, "head_dim": 8}),
    "DeepSeek-V3": ("DeepseekV3Config", {**MOE, **LATENT}),
}
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 3, "stops_when_slower": False}
NUM_LAYERS = 2


def mtp_model_config(kind: str, num_layers: int = NUM_LAYERS) -> PreTrainedConfig:
    """The config of a model of `num_layers` layers with one for multi-token prediction behind them."""
    name, options = KINDS[kind]
    sizes = {"vocab_size": 261, "max_position_embeddings": 96, "num_hidden_layers": num_layers}
    return make_config(name, **options, **sizes, num_mtp_layers=1, eos_token_id=1)


def save_with_mtp(kind: str, folder: Path) -> PreTrainedModel:
    """Save a model with a layer for multi-token prediction behind its own, under the names of published checkpoints."""
    model, deeper = (random_model(mtp_model_config(kind, count)) for count in (NUM_LAYERS, NUM_LAYERS + 1))
    save(deeper, folder / "deeper")
    save(model, folder)
    prefix, size = f"model.layers.{NUM_LAYERS}.", 32
    tensors = load_file(str(folder / "model.safetensors"))
    tensors |= {
        each: value for each, value in load_file(str(folder / "deeper/model.safetensors")).items() if prefix in each
    }
    generator = torch.Generator().manual_seed(1)
    tensors[f"{prefix}eh_proj.weight"] = torch.randn(size, 2 * size, generator=generator) * 0.3
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{norm}.weight"] = torch.rand(size, generator=generator) + 0.5
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("kind", ["GLM-4.5", pytest.param("DeepSeek-V3", marks=pytest.mark.slow)])
@torch.no_grad()
def test_the_layer_drafts_and_changes_no_answer(tmp_path: Path, kind: str) -> None:
    """Over graphs for GLM-4.5, whose drafts are compared; by torch's attention for latents."""
    model = save_with_mtp(kind, tmp_path)
    options: dict[str, Any] = {**SIZES, "num_kv_blocks": 21}
    if kind == "DeepSeek-V3":
        options |= {"attention_backend": "sdpa", "graph_kind": "auto"}
    prompts = [TEXT[:21], [5], TEXT[:6], TEXT[:25]]
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, allowed_token_ids=FEW)
    with load(tmp_path, **options) as llm:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        expected = [list(one.outputs[0].token_ids) for one in llm.generate(asked, params, use_tqdm=False)]
    num_compared = 0
    with load(tmp_path, speculative_config=MTP, **options) as llm:
        step = drafter_of(llm).step
        assert isinstance(step, HeadStep)
        alone = copy.deepcopy(step.head)
        alone.config._attn_implementation = "sdpa"
        engine, found = llm.engine, {str(number): [0] for number in range(len(prompts))}
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
        while engine.has_unfinished:
            for output in engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
            for request in engine.requests.values() if kind == "GLM-4.5" else ():
                if request.request_id not in step.target.states or not request.num_ready_drafts:
                    continue
                drafts = llm.runner.proposed([request.request_id])[request.request_id]  # type: ignore[attr-defined]
                text = [*prompts[int(request.request_id)], *request.output_token_ids]
                states = model.base_model(input_ids=torch.tensor([text[:-1]])).last_hidden_state[0]
                assert drafts == drafts_of_whole_text(alone, states, None, text)[: len(drafts)]
                num_compared += len(drafts)
        assert speculation(llm).num_draft_tokens > 20
        assert any("multi-token prediction layer" in note for note in llm.notes)
    assert list(found.values()) == expected
    assert num_compared > 40 or kind != "GLM-4.5"


def test_a_model_without_the_layer_is_refused(llama_dir: Path, tmp_path: Path) -> None:
    """By its config; by its files; with several layers; and where another model is named."""
    save_with_mtp("GLM-4.5", tmp_path)
    cases: list[tuple[Path, dict[str, Any], type[PiecegraphError], str]] = [
        (llama_dir, {}, ConfigError, "has no num_nextn_predict_layers"),
        (tmp_path, {"num_mtp_layers": 2}, UnsupportedModel, "has 2 layers for multi-token prediction"),
        (tmp_path / "deeper", {}, CheckpointError, r"has no tensor layers.3.eh_proj.weight"),
    ]
    for folder, overrides, error, message in cases:
        source = ModelSource(model=str(folder))
        config = load_config(source)
        for name, value in overrides.items():
            setattr(config, name, value)
        with pytest.raises(error, match=message):
            mtp_config(source, config)
    with pytest.raises(ConfigError, match="method 'mtp' has no draft model"):
        load(tmp_path, speculative_config={**MTP, "model": str(llama_dir)})
