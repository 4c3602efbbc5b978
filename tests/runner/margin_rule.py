"""The margin rule: each token is the likeliest by transformers after those before it, or nearly ties with that one.

Matrix products over another number of rows round differently, so two right programs may order such a pair
differently. transformers computes a prompt with the answer after it in one forward, by its eager attention: that gives
what `generate` would take at each step, in one step (`test_margin_rule.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

FLOAT32_NOISE = 1e-4
"""The error of a logit of magnitude one; measured differences on these models are ten times smaller."""


@torch.no_grad()
def generate_alone(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """transformers' greedy answer to one prompt, with its eager attention."""
    model.set_attn_implementation("eager")
    output = model.generate(  # type: ignore[operator]  # GenerationMixin's
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@torch.no_grad()
def assert_same_tokens(model: PreTrainedModel, prompt: Sequence[int], ours: Sequence[int]) -> None:
    """`ours` is what `model` would generate alone after `prompt`, by the margin rule."""
    model.set_attn_implementation("eager")
    text = torch.tensor([[*prompt, *ours]])
    logits = model(text, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    for step, (row, our) in enumerate(zip(logits, ours, strict=True)):
        their = int(row.argmax())
        margin, limit = float(row[their] - row[our]), FLOAT32_NOISE * float(row.abs().max().clamp(min=1.0))
        assert margin <= limit, f"token {step}: {our}, not {their}, whose logit is {margin:.2g} higher"
