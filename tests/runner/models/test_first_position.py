"""A model with positions of its own is run at those, found out by what its forward does and not by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph import LLM, SamplingParams
from piecegraph.errors import ConfigError, UnsupportedModel
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models import first_position as module
from piecegraph.runner.models.first_position import FirstPosition, first_position
from tests.quick_families import families
from tests.runner.tiny_models import FAMILIES, MAX_LEN, UNLISTED, make_config, random_model, save

SOURCE = ModelSource(model="./nowhere", load_format="dummy")
BEHIND_PADDING = [
    "RobertaConfig",
    "RobertaPreLayerNormConfig",
    "XLMRobertaConfig",
    "XLMRobertaXLConfig",
    "CamembertConfig",
    "Data2VecTextConfig",
]
PROMPT = [5, 17, 3, 90, 23, 41]


def config_of(name: str, **options: Any) -> Any:
    return make_config(name, **{"is_decoder": True, **options})


@pytest.mark.parametrize("name", BEHIND_PADDING)
def test_a_model_answers_like_its_own_forward(name: str, tmp_path: Path) -> None:
    """`generate` of transformers differs: it passes the positions 0, 1, 2, ... to every model."""
    model = random_model(config_of(name))
    with LLM(save(model, tmp_path), skip_tokenizer_init=True, dtype="float32", compiler="eager") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True)
        answer = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs[0]
        assert llm.max_model_len == MAX_LEN - 1, "a row of the table is the padding token's"
        assert any("positions begin at 1" in note for note in llm.notes)
    text = list(PROMPT)
    for token in answer.token_ids:
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, -1]
        assert token == int(logits.argmax())
        text.append(token)


def test_padding_tokens_elsewhere_move_the_first_position() -> None:
    """The model's forward is run, so every number is found."""
    found = first_position(SOURCE, config_of("RobertaConfig", pad_token_id=7))
    assert (found.value, found.uncounted_token) == (8, 7)


@pytest.mark.parametrize("name", families([*FAMILIES, *UNLISTED]))
def test_positions_of_other_models_begin_at_0(name: str) -> None:
    assert first_position(SOURCE, {**FAMILIES, **UNLISTED}[name]()) == FirstPosition(0)


def test_an_encoder_is_refused_by_its_attention(tmp_path: Path) -> None:
    folder = save(random_model(config_of("RobertaConfig", is_decoder=False)), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"RobertaForCausalLM is an encoder by its config.*runner=.pooling"):
        LLM(folder, skip_tokenizer_init=True, dtype="float32", compiler="eager")


def test_a_length_that_positions_do_not_reach_is_refused(tmp_path: Path) -> None:
    folder = save(random_model(config_of("RobertaConfig")), tmp_path)
    wanted = f'positions end at {MAX_LEN - 1}.*max_position_embeddings": {MAX_LEN + 1}'
    with pytest.raises(ConfigError, match=wanted):
        LLM(folder, skip_tokenizer_init=True, dtype="float32", compiler="eager", max_model_len=MAX_LEN)


class Backwards(nn.Module):
    """Counts from the end of the text where it is given no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(MAX_LEN, 4)

    def forward(self, input_ids: torch.Tensor, use_cache: bool, position_ids: torch.Tensor | None = None) -> Any:
        if position_ids is None:
            position_ids = input_ids.shape[1] - 1 - torch.arange(input_ids.shape[1])[None]
        return self.table(position_ids)


def test_positions_that_do_not_count_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_one_layer", lambda *args: Backwards())
    monkeypatch.setattr(module, "_may_run", lambda model_class: True)
    with pytest.raises(UnsupportedModel, match="Backwards computes its own positions .* not consecutive"):
        first_position(SOURCE, config_of("RobertaConfig"))


def test_an_unknown_first_position_is_in_the_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> Any:
        raise RuntimeError("this one has two layers\nor more")

    monkeypatch.setattr(module, "_one_layer", fail)
    found = first_position(SOURCE, config_of("RobertaConfig"))
    assert found.value == 0
    assert found.note.endswith("could not be determined: RuntimeError: this one has two layers")
