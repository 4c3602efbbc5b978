"""Quantised models on a GPU: every format and scheme answers as the dequantised model, from CUDA graphs too."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.runner.quantization.checkpoints.test_stored import assert_tokens_are_those_of
from tests.runner.quantization.checkpoints.written import FORMATS, write_checkpoint
from tests.runner.quantization.expert_models import dequantise_experts, mixture, write_mxfp4
from tests.runner.quantization.test_llm_quantised import PROMPTS, dequantised, largest_difference, load
from tests.runner.tiny_models import make_config, random_model, save

pytestmark = pytest.mark.gpu

ON_GPU: dict[str, object] = {"device": "cuda", "dtype": "float32", "compiler": "eager"}

ROUNDED_DIFFERENCE = 0.3
"""Of log probabilities where inputs are rounded: twice that of the reference from itself if its sums have 14 bits.

Tensor cores of Hopper add products of e4m3 so (for more than 16 rows; for fewer the kernel multiplies in float16), and
with other sums other inputs of the next linear are rounded up or down.
"""


@torch.no_grad()
def rounding_difference(model: PreTrainedModel) -> float:
    """Return by how much the log probability of a likeliest token differs if a float32 model computes in bfloat16."""
    found, rounded = 0.0, copy.deepcopy(model).bfloat16()
    for prompt in PROMPTS:
        exact, near = (each(torch.tensor([prompt])).logits[0].double().log_softmax(-1) for each in (model, rounded))
        likeliest = exact.argmax(-1, keepdim=True)
        found = max(found, float((exact - near).gather(-1, likeliest).abs().amax()))
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_answers_as_the_dequantised_model(name: str, tmp_path: Path) -> None:
    config, write, inputs = FORMATS[name]
    reference = write_checkpoint(tmp_path, config, write, inputs, intermediate_size=48)
    with load(tmp_path, quantization=None, **ON_GPU) as llm:
        bound = 1e-3 if inputs is None else ROUNDED_DIFFERENCE
        assert largest_difference(reference, llm) < bound
        assert_tokens_are_those_of(reference, llm, margin=bound)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_plain_checkpoint_answers_as_the_dequantised_model(quantization: str, compiler: str, tmp_path: Path) -> None:
    model = random_model(make_config("LlamaConfig", hidden_size=64, intermediate_size=128))
    save(model, tmp_path)
    with load(tmp_path, quantization=quantization, **{**ON_GPU, "compiler": compiler}) as llm:
        bound = 0.15 if quantization == "int8" else 1e-3  # inputs are rounded to bfloat16 with int8
        assert largest_difference(dequantised(model, quantization), llm) < bound
        (note,) = [note for note in llm.notes if note.startswith("quantization")]
        assert "our Triton kernel" in note and "int4-tiles" not in note


def test_weights_of_4_bits_in_words_answer_as_the_dequantised_model(tmp_path: Path) -> None:
    """From CUDA graphs too; sizes that words fit. The checkpoint and the bound are those of the next test."""
    model = random_model(make_config("LlamaConfig", hidden_size=128, intermediate_size=256)).bfloat16()
    save(model, tmp_path)
    reference = dequantised(model, "int4").float()
    bound = 2 * rounding_difference(reference)
    for options in ({"enforce_eager": True}, {"compiler": "eager"}):
        with load(tmp_path, quantization="int4", device="cuda", dtype="bfloat16", **options) as llm:
            (note,) = [note for note in llm.notes if note.startswith("quantization")]
            assert "int4-words" in note
            assert largest_difference(reference, llm) < bound


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_graphs_answer_in_bfloat16_as_no_graphs_do(quantization: str, tmp_path: Path) -> None:
    """Both differ at most twice as much as the dequantised model in bfloat16 from the same weights in float32.

    The checkpoint is in bfloat16: weights of float32 would be rounded to it first, and then to other integers.
    """
    model = random_model(make_config("LlamaConfig", hidden_size=64, intermediate_size=128)).bfloat16()
    save(model, tmp_path)
    reference = dequantised(model, quantization).float()
    bound = 2 * rounding_difference(reference)
    for options in ({"enforce_eager": True}, {"compiler": "eager"}):
        with load(tmp_path, quantization=quantization, device="cuda", dtype="bfloat16", **options) as llm:
            assert largest_difference(reference, llm) < bound


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_experts_answer_as_those_of_the_dequantised_model(quantization: str, tmp_path: Path) -> None:
    model = mixture("mixtral", num_experts_per_tok=4)  # rounded inputs could choose others
    save(model, tmp_path)
    dequantise_experts(model, quantization)
    with load(tmp_path, quantization=quantization, **ON_GPU) as llm:
        assert largest_difference(dequantised(model, quantization), llm) < (0.15 if quantization == "int8" else 1e-3)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_experts_in_mxfp4_answer_as_transformers_dequantises_them(compiler: str, tmp_path: Path) -> None:
    """From CUDA graphs."""
    reference = write_mxfp4(tmp_path)
    with load(tmp_path, quantization=None, max_model_len=64, **{**ON_GPU, "compiler": compiler}) as llm:
        assert largest_difference(reference, llm) < 1e-3
        assert_tokens_are_those_of(reference, llm)
