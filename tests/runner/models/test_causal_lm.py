"""Models that count their tokens take the positions of a flattened batch, where several texts begin at 0."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from transformers import BartForCausalLM, LlamaForCausalLM, MambaForCausalLM

from piecegraph.errors import UnsupportedModel
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models import first_position as first_position_module
from piecegraph.runner.models.causal_lm import CountedPositions, counts_positions
from piecegraph.runner.models.first_position import FirstPosition, first_position
from tests.runner.architectures import tiny_config

SOURCE = ModelSource(model="./nowhere", load_format="dummy")
POSITIONS = torch.tensor([4, 5, 0, 1, 2])


def test_a_range_over_the_tokens_is_their_positions() -> None:
    """Any other range stays."""
    with CountedPositions(POSITIONS):
        assert torch.arange(5) is POSITIONS and torch.arange(0, 5) is POSITIONS
        assert torch.arange(5, device="cpu").tolist() == [4, 5, 0, 1, 2]
        assert torch.arange(4).tolist() == [0, 1, 2, 3]
        assert torch.arange(1, 5).tolist() == [1, 2, 3, 4]


def test_which_models_count() -> None:
    assert counts_positions(BartForCausalLM)
    assert not counts_positions(LlamaForCausalLM)
    assert not counts_positions(MambaForCausalLM), "its layers need none"


def test_a_counting_model_begins_at_0() -> None:
    """Its table has rows before that of the first position, which the model adds by itself."""
    assert first_position(SOURCE, tiny_config("bart")) == FirstPosition(0)


def test_a_model_that_counts_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong positions would give wrong tokens without a word."""
    monkeypatch.setattr(first_position_module, "CountedPositions", lambda positions: nullcontext())
    with pytest.raises(UnsupportedModel, match=r"takes no position_ids, and its positions are not those of a table"):
        first_position(SOURCE, tiny_config("bart"))
