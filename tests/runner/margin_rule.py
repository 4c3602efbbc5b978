"""The margin rule: tokens equal transformers', except after a step where its own top two nearly tie.

Matrix products over another number of rows round differently, so two right programs may order such a
pair differently. Everything before that step must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

FLOAT32_NOISE = 1e-4
"""Of a logit of magnitude one; measured differences on these models stay ten times below."""


@torch.no_grad()
def generate_alone(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """transformers' greedy answer to one prompt, with its eager attention."""
    model.set_attn_implementation("eager")
    output = model.generate(  # type: ignore[operator]  # GenerationMixin's
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def assert_same_tokens(
    model: PreTrainedModel, prompt: Sequence[int], ours: Sequence[int], noise: float = FLOAT32_NOISE
) -> None:
    """`ours` is what `model` would generate alone after `prompt`, by the margin rule."""
    theirs = generate_alone(model, prompt, len(ours))
    for step, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if our != their:
            margin, scale = _margin(model, [*prompt, *theirs[:step]], our, their)
            assert margin <= noise * scale, f"token {step}: {our}, not {their}, whose logit is {margin:.2g} higher"
            return


@torch.no_grad()
def _margin(model: PreTrainedModel, tokens: Sequence[int], our: int, their: int) -> tuple[float, float]:
    logits = model(torch.tensor([list(tokens)])).logits[0, -1].double()
    return float(logits[their] - logits[our]), float(logits.abs().max().clamp(min=1.0))
