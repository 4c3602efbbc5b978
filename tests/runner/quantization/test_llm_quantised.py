"""`LLM(quantization="int8")`: log probabilities are those of the dequantised model, and the key knows the scheme."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.errors import CheckpointError, ConfigError, UnsupportedModel
from piecegraph.passes.ops.quantised import int4_tiles_linear
from piecegraph.passes.ops.quantised.int4_tiles_linear import tile_rows
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.online import online_schemes
from piecegraph.tools.cache.entries.model_key import model_key
from tests.runner.tiny_models import make_config, make_model, random_model, save

PROMPTS = [[5, 9, 2, 77, 31, 8], list(range(3, 40)), [64]]
MAX_TOKENS = 8

TILES = tile_rows()
MAX_DIFFERENCE = 0.15
"""Of log probabilities: activations are rounded to bfloat16 in each of the 15 linears, and are not in the reference."""


def load(folder: Path, **options: object) -> LLM:
    arguments = {"skip_tokenizer_init": True, "device": "cpu", "num_kv_blocks": 16, "quantization": "int8", **options}
    return LLM(str(folder), **arguments)  # type: ignore[arg-type]


def dequantised(model: PreTrainedModel, quantization: str = "int8") -> PreTrainedModel:
    """Write the weights that quantised linears multiply by to the model, in place; an embedding comes before a head."""
    scheme_of = online_schemes(quantization)
    seen: set[int] = set()
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding) or id(module.weight) in seen:
            continue
        seen.add(id(module.weight))
        scheme = scheme_of(path, type(module).__name__)
        if scheme is not None:
            method = METHODS[scheme.method]
            module.weight.data = method.unpack(method.pack(module.weight.data, scheme))
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
        assert "linears are int8" in note and "1 embeddings are int8" in note
        (merged,) = [row for row in llm.compiled.report().passes if row.name == "merge-projections"]
        assert merged.matches == 4  # query, key and value, and gate and up, in each of two layers


def test_another_scheme_multiplies_by_the_dequantised_weights(tmp_path: Path) -> None:
    model = random_model(make_config("LlamaConfig", hidden_size=64, intermediate_size=128))
    save(model, tmp_path)
    with load(tmp_path, dtype="float32", quantization="fp8", compiler="eager") as llm:
        assert largest_difference(dequantised(model, "fp8"), llm) < 1e-3
        (note,) = [note for note in llm.notes if note.startswith("quantization")]
        assert "15 linears are fp8" in note


@pytest.mark.skipif(TILES is None, reason="torch's kernel has no tiles on this machine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_4_bits_have_an_order_of_their_own_for_bfloat16(dtype: torch.dtype, tmp_path: Path) -> None:
    """The difference is at most twice that of the dequantised model in bfloat16, in which sums are rounded too.

    With float32 only the inputs and outputs of linears are rounded.
    """
    model = random_model(make_config("LlamaConfig", hidden_size=64, intermediate_size=128)).bfloat16()
    save(model, tmp_path)
    rounded = dequantised(model, "int4")
    reference = copy.deepcopy(rounded).float()
    prompt = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        exact, near = (each(prompt).logits.double().log_softmax(-1) for each in (reference, rounded))
    with load(tmp_path, quantization="int4", dtype=dtype, enforce_eager=True) as llm:
        assert llm.model_config.dtype is dtype
        assert largest_difference(reference, llm) < 2 * float((exact - near).abs().amax())
        (note,) = [note for note in llm.notes if note.startswith("quantization")]
        num_tiled = 11 if TILES == 64 else 15  # keys and values have 32 rows, which only smaller tiles divide
        assert f"{num_tiled} linears are int4-tiles in groups of 32" in note


@pytest.mark.slow
def test_activations_are_bfloat16_unless_said_otherwise(llama: Path, tmp_path: Path) -> None:
    with load(llama, enforce_eager=True) as llm:
        assert llm.model_config.dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="dtype=float16 is not available with quantization='int8'"):
        load(llama, dtype="float16")
    source = ModelSource(model=str(llama))
    half = ModelSource(model=str(save(random_model(make_config("LlamaConfig", dtype=torch.float16)), tmp_path)))
    for each, method in ((source, "int8"), (half, "int4")):
        told = explain(EngineConfig(source=each, quantization=method), assume_gpu=True)
        assert told.dtype is torch.bfloat16
        (note,) = [note for note in told.notes if note.startswith("quantization")]
        assert f"linears are {method}" in note and f"{method} by our Triton kernel" in note


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
    (note,) = [note for note in explain(quantised).notes if note.startswith("quantization")]
    assert "15 linears are int8" in note and "1 embeddings are int8" in note
    assert f"int8 by {METHODS['int8'].kernels['cpu']}" in note and "MB int8" in note and "MB float32" in note


@pytest.mark.skipif(tile_rows() is None, reason="torch's kernel has no tiles on this machine")
def test_the_key_knows_the_kernel_that_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same scheme where torch's kernel for 4 bits has no tiles is another graph, and so another key."""
    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")
    folder = save(random_model(make_config("LlamaConfig", hidden_size=64, intermediate_size=128)), tmp_path)
    config = EngineConfig(source=ModelSource(model=str(folder)), device="cpu", dtype="bfloat16", quantization="int4")
    tiled = model_key(config).key
    monkeypatch.setattr(int4_tiles_linear, "tile_rows", lambda: None)
    assert None not in {tiled, model_key(config).key} and model_key(config).key != tiled
    (note,) = [note for note in explain(config).notes if note.startswith("quantization")]
    assert "int4-tiles" not in note and "int4 by GEMM over weights that are dequantised" in note
