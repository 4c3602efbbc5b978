"""`piecegraph run` on a folder with a model of gated delta nets and attention, as Qwen3.5 is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from piecegraph.tools.cli import main
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.tiny_models import make_config, random_model, save

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

PROMPT = "The capital of Italy, as far as we know"
FLAGS = (
    "--compiler eager --max-model-len 64 --block-size 4 --max-num-batched-tokens 5 --max-num-seqs 4 --max-tokens 16 "
    "--temperature 0 --ignore-eos"
)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """A tiny random Qwen3.5 with the byte tokenizer."""
    sizes: dict[str, Any] = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    model = random_model(
        make_config(
            "Qwen3_5TextConfig", vocab_size=261, eos_token_id=1, num_hidden_layers=4, layer_types=layers,
            linear_num_value_heads=4, head_dim=16, **sizes,
        )
    )  # fmt: skip
    folder = save(model, tmp_path_factory.mktemp("qwen"))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(str(folder))
    return model, folder


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_run_gives_the_tokens_of_transformers(
    qwen: tuple[PreTrainedModel, Path], drafts: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt of several chunks."""
    model, folder = qwen
    speculative = json.dumps({"method": "ngram", "num_speculative_tokens": 2})
    more = ["--speculative", speculative] if drafts else []
    assert main(["run", str(folder), PROMPT, "--json", *FLAGS.split(), *more]) == 0
    found = json.loads(capsys.readouterr().out)
    prompt = byte_tokenizer()(PROMPT)["input_ids"]
    assert found["prompt_tokens"] == len(prompt) > 5 and len(found["token_ids"]) == 16
    assert_same_tokens(model, prompt, found["token_ids"])
    assert found["text"] == byte_tokenizer().decode(found["token_ids"], skip_special_tokens=True)
