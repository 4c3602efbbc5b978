"""The margin rule: tokens equal transformers', except after a step where its own top two nearly tie.

Matrix products over another number of rows round differently, so two right programs may order such a
pair differently. Everything before that step must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

FLOAT32_NOISE = 1e-4
"""The error of a logit of magnitude one; measured differences on these models are ten times smaller."""


def generate_alone(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """transformers' greedy answer to one prompt, with its eager attention."""
    return generate_together(model, [prompt], num_tokens)[0]


@torch.no_grad()
def generate_together(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """transformers' greedy answers to several prompts in one left-padded batch."""
    longest = max(len(prompt) for prompt in prompts)
    model.set_attn_implementation("eager")
    output = model.generate(  # type: ignore[operator]  # GenerationMixin's
        torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[list[int]] = output[:, longest:].tolist()
    return tokens


def assert_same_tokens(model: PreTrainedModel, prompt: Sequence[int], ours: Sequence[int]) -> None:
    """`ours` is what `model` would generate alone after `prompt`, by the margin rule."""
    assert_within_margin(model, prompt, ours, generate_alone(model, prompt, len(ours)))


def assert_within_margin(
    model: PreTrainedModel, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> None:
    """`ours` equals `theirs`, up to a step where `model`'s own logits of the two tokens nearly tie."""
    for step, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if our != their:
            margin, scale = _margin(model, [*prompt, *theirs[:step]], our, their)
            limit = FLOAT32_NOISE * scale
            assert abs(margin) <= limit, f"token {step}: {our}, not {their}, whose logit is {margin:.2g} higher"
            return


@torch.no_grad()
def _margin(model: PreTrainedModel, tokens: Sequence[int], our: int, their: int) -> tuple[float, float]:
    logits = model(torch.tensor([list(tokens)])).logits[0, -1].double()
    return float(logits[their] - logits[our]), float(logits.abs().max().clamp(min=1.0))
