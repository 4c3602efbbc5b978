"""Adapters beside quantised weights: the base is quantised, the adapter stays in floats and is never merged into it.

The reference is transformers with the dequantised weights, into which peft has merged the adapter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM, LoRARequest, SamplingParams
from piecegraph.config import PASSES
from piecegraph.errors import CheckpointError
from piecegraph.runner.lora.modules import LoraQuantisedEmbedding, LoraQuantisedLinear
from piecegraph.runner.quantization import online
from tests.runner.lora.adapters import PROJECTIONS, write_adapter
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.quantization.checkpoints.written import FORMATS, write_checkpoint
from tests.runner.quantization.test_llm_quantised import dequantised
from tests.runner.tiny_models import make_config, make_model, random_model, save

PROMPTS = [[5, 9, 2, 77, 31, 8], [64], list(range(3, 40))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
OPTIONS: list[dict[str, Any]] = [{"r": 4}, {"r": 3, "target_modules": [*PROJECTIONS, "lm_head", "embed_tokens"]}]


def load(folder: Path, **options: Any) -> LLM:
    arguments = {
        "skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "compiler": "eager", "num_kv_blocks": 64,
        "enable_lora": True, "max_loras": 2, "max_lora_rank": 4, "compilation_config": {"passes": PASSES}, **options,
    }  # fmt: skip
    return LLM(str(folder), **arguments)


def write_adapters(model: PreTrainedModel, folder: Path) -> tuple[list[LoRARequest | None], list[PreTrainedModel]]:
    """Return two adapters and None, and the model with each of them."""
    requests: list[LoRARequest | None] = []
    models: list[PreTrainedModel] = []
    for number, options in enumerate(OPTIONS, start=1):
        path = folder / f"adapter{number}"
        models.append(write_adapter(model, path, number, **options))
        requests.append(LoRARequest(f"adapter{number}", number, str(path)))
    return [*requests, None], [*models, model]


def generated(llm: LLM, requests: list[LoRARequest | None]) -> list[Any]:
    """Return the outputs for each prompt with each adapter, in one batch."""
    prompts = [{"prompt_token_ids": prompt} for _ in requests for prompt in PROMPTS]
    loras = [request for request in requests for _ in PROMPTS]
    return llm.generate(prompts, GREEDY, lora_request=loras, use_tqdm=False)


def largest_difference(models: list[PreTrainedModel], outputs: list[Any]) -> float:
    """Return by how much the log probability of a token differs from that of its model."""
    found = 0.0
    for place, output in enumerate(outputs):
        prompt, tokens = PROMPTS[place % len(PROMPTS)], list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = models[place // len(PROMPTS)](torch.tensor([[*prompt, *tokens]])).logits[0].double()
        wanted = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        for row, token, logprobs in zip(wanted, tokens, output.outputs[0].logprobs, strict=True):
            found = max(found, abs(float(row[token]) - logprobs[token].logprob))
    return found


@pytest.mark.parametrize("quantization", ["fp8", "int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_weights_that_are_quantised_at_the_start(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With int8, inputs of linears are rounded to bfloat16, and log probabilities are held loosely for it.

    With int4, the kernel for linears that rounds float32 to bfloat16 is left out.
    """
    linears, embeddings = online.SCHEMES["int4"]
    exact = {**online.SCHEMES, "int4": (replace(linears, may_round=False), embeddings)}
    monkeypatch.setattr(online, "SCHEMES", exact)
    model = random_model(make_config("LlamaConfig", intermediate_size=64))  # groups of 32 divide it
    base = save(model, tmp_path / "base")
    requests, models = write_adapters(dequantised(model, quantization), tmp_path)
    with load(base, quantization=quantization) as llm:
        kinds = {type(module) for module in llm._loaded.model.model.modules()}  # type: ignore[union-attr]
        assert LoraQuantisedLinear in kinds and (LoraQuantisedEmbedding in kinds) == (quantization != "fp8")
        outputs = generated(llm, requests)
        matches = {row.name: row.matches for row in llm.compiled.report().passes}
        assert matches["merge-projections"] == 4, matches
    assert largest_difference(models, outputs) < (0.15 if quantization == "int8" else 1e-4)
    assert largest_difference([models[-1]] * 3, outputs) > 0.5
    if quantization != "int8":
        for place, output in enumerate(outputs):
            assert_same_tokens(models[place // len(PROMPTS)], PROMPTS[place % 3], output.outputs[0].token_ids)


def test_a_quantised_checkpoint(tmp_path: Path) -> None:
    """One module is not quantised in it, and groups of 4 bits have adapters beside them."""
    config, write, inputs = FORMATS["W4A16"]
    reference = write_checkpoint(tmp_path / "base", config, write, inputs)
    requests, models = write_adapters(reference, tmp_path)
    with load(tmp_path / "base") as llm:
        outputs = generated(llm, requests)
    assert largest_difference(models, outputs) < 1e-4


def test_an_adapter_of_another_model_is_refused_by_its_embedding(tmp_path: Path) -> None:
    """The embedding that peft saves beside the matrices is compared with the quantised one."""
    base = save(make_model("llama"), tmp_path / "base")
    write_adapter(make_model("llama", seed=3), tmp_path / "other", 1, target_modules=["embed_tokens"])
    other, wanted = (
        LoRARequest("x", 1, str(tmp_path / "other")),
        "the weight of model.embed_tokens in it is not the model",
    )
    with load(base, quantization="int8") as llm, pytest.raises(CheckpointError, match=wanted):
        llm.generate({"prompt_token_ids": [5]}, GREEDY, lora_request=other)
