"""The margin rule: each token is the likeliest by transformers after those before it, or nearly ties with that one.

Matrix products over another number of rows round differently, so two right programs may order such a pair
differently. transformers computes a prompt with the answer after it in one forward, by its eager attention: that gives
what `generate` would take at each step, in one step (`test_margin_rule.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

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
    with in_torch(model):
        logits = model(text, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    for step, (row, our) in enumerate(zip(logits, ours, strict=True)):
        their = int(row.argmax())
        margin, limit = float(row[their] - row[our]), FLOAT32_NOISE * float(row.abs().max().clamp(min=1.0))
        assert margin <= limit, f"token {step}: {our}, not {their}, whose logit is {margin:.2g} higher"


def library_functions(model: PreTrainedModel) -> dict[str, Callable[..., Any]]:
    """The functions of a model's code that are a library's where that is installed, such as flash-linear-attention.

    By name; of layers with states only. Each has torch's own, which transformers wrote, as `__wrapped__`.
    """
    found = vars(sys.modules[type(model).__module__]).items()
    return {
        name: value
        for name, value in found
        if "is_new_implementation" in getattr(getattr(value, "__code__", None), "co_freevars", ())
    }


def in_torch(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Let a model's code call torch's own functions: a library's kernels take no tensors of a CPU."""
    own = {name: function.__wrapped__ for name, function in library_functions(model).items()}  # type: ignore[attr-defined]
    return with_functions(model, own)


@contextmanager
def with_functions(model: PreTrainedModel, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of a model's code, by name, while the block runs."""
    module = vars(sys.modules[type(model).__module__])
    before = {name: module[name] for name in functions}
    module.update(functions)
    try:
        yield
    finally:
        module.update(before)
