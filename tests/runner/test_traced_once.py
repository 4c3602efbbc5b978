"""The tests' own sharing of traces: models of one config are traced once, and every other model is traced itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from piecegraph import LLM, CompileConfig, SamplingParams, compile
from piecegraph.compiler.tracing.trace import trace
from tests.runner import traced_once
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.tiny_models import make_config, random_model, save

PROMPT = [5, 6, 7]
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "compiler": "eager", "num_kv_blocks": 8}


@pytest.mark.slow
def test_models_of_one_config_share_a_trace_and_nothing_else(tmp_path: Path) -> None:
    """The weights are each model's own; another config, and another value that the trace read, are traced."""
    base = {"num_hidden_layers": 1}
    options: list[dict[str, Any]] = [base, base, {**base, "rms_norm_eps": 0.5}, base]
    models = [random_model(make_config("LlamaConfig", **each), seed) for seed, each in enumerate(options)]
    tokens, num_traced = [], []
    with (
        traced_once.shared_traces() as kept,
        patch.object(traced_once, "trace", side_effect=trace) as tracing,
    ):
        for number, model in enumerate(models):
            with LLM(save(model, tmp_path / str(number)), **OPTIONS) as llm:
                (output,) = llm.generate(
                    [{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False
                )
            tokens.append(output.outputs[0].token_ids)
            num_traced.append(tracing.call_count)
    assert (num_traced, len(kept)) == ([1, 1, 2, 2], 2)
    for model, ours in zip(models, tokens, strict=True):
        assert_same_tokens(model, PROMPT, ours)


SCALE = 2.0


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * SCALE


def test_a_trace_is_not_shared_once_a_value_that_it_read_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key names a global variable; the trace's own reads do."""
    found = []
    with traced_once.shared_traces() as kept:
        for scale in (2.0, 2.0, 3.0):
            monkeypatch.setattr(sys.modules[__name__], "SCALE", scale)
            x = torch.ones(3)
            compiled = compile(Scaled(), CompileConfig(compiler="eager"), example_inputs=(x,))
            found.append((compiled(x).tolist(), len(kept)))
    assert found == [([2.0] * 3, 1), ([2.0] * 3, 1), ([3.0] * 3, 1)]
