"""longrope's regime is decided once, from max_model_len, and said."""

from __future__ import annotations

import pytest
import torch

from piecegraph.runner.models.rope import fix_longrope
from tests.runner.tiny_models import MAX_LEN, make_model


@pytest.mark.parametrize(("max_model_len", "regime"), [(8, "short"), (9, "long"), (MAX_LEN, "long")])
def test_the_regime_follows_max_model_len(max_model_len: int, regime: str) -> None:
    """The frequencies equal those of transformers after a text of that length."""
    model, reference = make_model("phi3-longrope-long"), make_model("phi3-longrope-long")
    (note,) = fix_longrope(model, max_model_len)
    assert note.startswith(f"longrope: {regime} factors, as max_model_len={max_model_len} is")
    reference(torch.zeros(1, max_model_len, dtype=torch.int64))
    mine, theirs = (dict(m.named_buffers())["model.rotary_emb.inv_freq"] for m in (model, reference))
    assert torch.equal(mine, theirs)


def test_short_texts_keep_the_long_regime() -> None:
    """Keys already cached stay right: a short forward pass changes nothing."""
    model = make_model("phi3-longrope-long")
    fix_longrope(model, MAX_LEN)
    before = dict(model.named_buffers())["model.rotary_emb.inv_freq"].clone()
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert torch.equal(dict(model.named_buffers())["model.rotary_emb.inv_freq"], before)


def test_other_models_are_left_alone() -> None:
    assert fix_longrope(make_model("llama-yarn"), MAX_LEN) == []
