"""Each format: log probabilities and greedy tokens are those of the dequantised model, and bad files are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM, SamplingParams
from piecegraph.errors import CheckpointError, UnsupportedModel
from piecegraph.runner.quantization.checkpoints.all_formats import stored_checkpoint
from piecegraph.runner.quantization.checkpoints.stored import check_headers
from tests.runner.quantization.checkpoints.written import (
    FORMATS,
    GPTQ,
    Tensors,
    change_tensors,
    gptq,
    slices,
    write_checkpoint,
)
from tests.runner.quantization.test_llm_quantised import largest_difference, load

pytestmark = pytest.mark.usefixtures("without_cpp_kernels")

MAX_DIFFERENCE = {None: 1e-4, "int8": 2e-2, "tokens": 2e-2, "groups": 2e-2}
"""Of log probabilities, by how inputs are rounded: a value that lies between two steps may be rounded either way."""

Q = "model.layers.1.self_attn.q_proj"

PROMPTS = [[(7 * number + 3 * place) % 128 for place in range(2 + number)] for number in range(20)]


def assert_tokens_are_those_of(model: PreTrainedModel, llm: LLM, margin: float = 2e-2) -> None:
    """Greedy tokens equal the model's, except after a token where its two best are closer than `margin`."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False):
        tokens = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([[*output.prompt_token_ids, *tokens]])).logits[0]
        for row, token in zip(logits[len(output.prompt_token_ids) - 1 : -1], tokens, strict=True):
            best = row.topk(2)
            assert token == best.indices[0] or best.values[0] - best.values[1] < margin


@pytest.mark.parametrize(
    "name", [name if name in ("W4A16", "FP8_BLOCK") else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def test_log_probabilities_and_tokens_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    config, write, inputs = FORMATS[name]
    reference = write_checkpoint(tmp_path, config, write, inputs, intermediate_size=48)
    with load(tmp_path, quantization=None, dtype="float32", enforce_eager=True) as llm:
        assert largest_difference(reference, llm) < MAX_DIFFERENCE[inputs]
        assert_tokens_are_those_of(reference, llm)
        (note,) = [note for note in llm.notes if note.startswith("quantization")]
        assert note.startswith("quantization: 13 linears are ")
        assert "2 x Linear.weight (not quantised in the checkpoint)" in note


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "version"), [(4, 1), (4, 2), pytest.param(8, 1, id="8 bits")])
def test_a_gptq_checkpoint_as_gptqmodel_writes_it(bits: int, version: int, tmp_path: Path) -> None:
    """Every projection is quantised; the head and the embedding are not."""
    config = {**GPTQ, "bits": bits, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    write = partial(gptq, bits=bits, version=version)
    reference = write_checkpoint(tmp_path, config, write, leaves_one=False, intermediate_size=48)
    with load(tmp_path, quantization=None, dtype="float32", enforce_eager=True) as llm:
        assert largest_difference(reference, llm) < MAX_DIFFERENCE[None]
        assert_tokens_are_those_of(reference, llm)
        (note,) = [note for note in llm.notes if note.startswith("quantization")]
        assert note.startswith("quantization: 14 linears are ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q}.qzeros"), "has a tensor missing: .*q_proj.qzeros"),
        (
            lambda t: t.update({f"{Q}.scales": torch.ones(3, 32).half()}),
            r"scales is F16 \[3, 32\].* or F16 \[2, 32\]",
        ),
    ],
)
def test_bad_files_of_gptq_are_refused(change: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, GPTQ, gptq, leaves_one=False)
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as raised:
        load(tmp_path, quantization=None, enforce_eager=True)
    assert raised.value.exit_code == 3


BAD_TENSORS: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("AWQ", lambda t: t.pop(f"{Q}.qzeros"), "has a tensor missing: .*q_proj.qzeros"),
    (
        "AWQ",
        lambda t: t.update({f"{Q}.scales": torch.ones(3, 32).half()}),
        r"scales is F16 \[3, 32\].* or F16 \[2, 32\]",
    ),
    ("AWQ", lambda t: t.pop(f"{Q}.qweight"), "missing: .*q_proj.qweight"),
    ("W4A16 with zero points", lambda t: t.pop(f"{Q}.weight_zero_point"), "missing: .*q_proj.weight_zero_point"),
    ("W4A16", lambda t: t[f"{Q}.weight_scale"].fill_(float("inf")), "weight_scale has values that are infinite"),
    ("FP8_BLOCK", lambda t: t.update({f"{Q}.weight_scale": torch.ones(1, 2)}), r"weight_scale is F32 \[1, 2\]"),
    ("FP8_DYNAMIC", lambda t: t.update({f"{Q}.weight": torch.ones(32, 32)}), "weight is F32 .* needs F8_E4M3"),
    ("FP8_DYNAMIC", lambda t: t[f"{Q}.weight"].view(torch.uint8).fill_(127), "has values that are not numbers"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD_TENSORS)
def test_bad_files_are_refused(name: str, change: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    config, write, inputs = FORMATS[name]
    write_checkpoint(tmp_path, config, write, inputs)
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as raised:
        load(tmp_path, quantization=None, enforce_eager=True)
    assert raised.value.exit_code == 3


def test_a_group_size_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    config, write, inputs = FORMATS["AWQ"]
    write_checkpoint(tmp_path, {**config, "group_size": 12}, write, inputs)
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj.*groups of 12 do not divide its 32 columns"):
        load(tmp_path, quantization=None, enforce_eager=True)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quantised with 'bitsandbytes', which cannot be read here; formats that can",
        ),
        ({"quant_method": "hqq"}, "quantization='int8' or 'int4' quantises while it loads"),
        ({"quant_method": "awq", "bits": 3}, "'awq', whose bits=3 cannot be read here"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'awq', whose version='gemv' cannot be read here"),
        ({"quant_method": "gptq", "bits": 2}, "'gptq', whose bits=2 cannot be read here"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "'fp8', whose activation_scheme='static' cannot"),
    ],
)
def test_other_formats_are_refused_by_name(written: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as raised:
        stored_checkpoint(written)
    assert raised.value.exit_code == 3


def test_what_a_model_leaves_out_by_name_may_be_quantised() -> None:
    """Layers for multi-token prediction of Qwen3-Next, for one, are `mtp.*`, which transformers leaves out."""
    checkpoint = stored_checkpoint(FORMATS["FP8_BLOCK"][0])
    assert checkpoint is not None
    stored = slices({f"mtp.layers.0.q_proj.{name}": torch.ones(2) for name in ("weight", "weight_scale")})
    check_headers(stored, checkpoint, {}, {}, [r"^mtp.*"])
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.0\.q_proj is quantised in the files"):
        check_headers(stored, checkpoint, {}, {}, [r"^vision.*"])
