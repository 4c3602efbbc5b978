"""`LLM(quantization="int8")`: log probabilities are those of the dequantised model, and the key knows the scheme."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.errors import CheckpointError, ConfigError, UnsupportedModel
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.quantization.linear_method import METHODS
from piecegraph.tools.cache.entries.model_key import model_key
from tests.runner.tiny_models import make_model, save

PROMPTS = [[5, 9, 2, 77, 31, 8], list(range(3, 40)), [64]]
MAX_TOKENS = 8
INT8 = METHODS["int8"]

MAX_DIFFERENCE = 0.15
"""Of log probabilities: activations are rounded to bfloat16 in each of the 15 linears, and are not in the reference."""


def load(folder: Path, **options: object) -> LLM:
    arguments = {"skip_tokenizer_init": True, "device": "cpu", "num_kv_blocks": 16, "quantization": "int8", **options}
    return LLM(str(folder), **arguments)  # type: ignore[arg-type]


def dequantised(model: PreTrainedModel) -> PreTrainedModel:
    """Write the weights that int8 multiplies by to the model, in place."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            module.weight.data = INT8.unpack(INT8.pack(module.weight.data))
    return model


def largest_difference(model: PreTrainedModel, llm: LLM) -> float:
    """Return by how much the log probability of a generated token differs from the model's."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    found = 0.0
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params):
        tokens = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([[*output.prompt_token_ids, *tokens]])).logits[0].double()
        wanted = logits.log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None and len(logprobs) == MAX_TOKENS
        for row, token, logprob in zip(wanted, tokens, logprobs, strict=True):
            found = max(found, abs(float(row[token]) - logprob[token].logprob))
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_log_probabilities_are_those_of_the_dequantised_model(llama: Path, compiler: str) -> None:
    reference: PreTrainedModel = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    with load(llama, dtype="float32", compiler=compiler) as llm:
        assert largest_difference(dequantised(reference), llm) < MAX_DIFFERENCE
        (note,) = [note for note in llm.notes if note.startswith("quantization")]
        assert "linears and 1 embedding are int8" in note
        (merged,) = [row for row in llm.compiled.report().passes if row.name == "merge-projections"]
        assert merged.matches == 4  # query, key and value, and gate and up, in each of two layers


def test_activations_are_bfloat16_unless_said_otherwise(llama: Path) -> None:
    with load(llama, enforce_eager=True) as llm:
        assert llm.model_config.dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="dtype=float16 is not available with quantization='int8'"):
        load(llama, dtype="float16")
    source = ModelSource(model=str(llama))
    with pytest.raises(ConfigError, match="quantization='int8' has no kernel for GPUs yet"):
        explain(EngineConfig(source=source, quantization="int8"), assume_gpu=True)


def test_weights_are_read_again_quantised(llama: Path, tmp_path: Path) -> None:
    other = make_model("llama", seed=3)
    with load(llama, dtype="float32", enforce_eager=True) as llm:
        llm.reload_weights(save(other, tmp_path))
        assert largest_difference(dequantised(other), llm) < MAX_DIFFERENCE
        with pytest.raises(CheckpointError, match="the model has no tensor 'model.embed_tokens.weight'"):
            llm.reload_weights({"model.embed_tokens.weight": torch.zeros(128, 32)})


def test_models_with_states_or_latents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"latent attention \(kv_lora_rank\), with which quantised weights"):
        load(save(make_model("deepseek-v3"), tmp_path))


def test_the_key_and_explain_know_the_scheme(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")
    plain, quantised = (
        EngineConfig(source=ModelSource(model=str(llama)), device="cpu", dtype="float32", quantization=scheme)
        for scheme in (None, "int8")
    )
    keys = {model_key(config).key for config in (plain, quantised)}
    assert None not in keys and len(keys) == 2
    assert any("linears and 1 embedding are int8" in note for note in explain(quantised).notes)
