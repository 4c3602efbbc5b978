"""Tests of the bench's byte counts and its grid; its times can only be tested on a GPU."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from piecegraph.passes.kernels.moe.config import moe_config
from piecegraph.tools.bench.kernels.moe import (
    LAYERS,
    Inputs,
    Row,
    _expected,
    _grouped_mm_form,
    as_data,
    bytes_to_read,
    main,
    other_configs,
)
from tests.passes.moe_inputs import moe_inputs

QWEN3 = LAYERS["qwen3-30b-a3b"]


def row(us: float | None) -> Row:
    return Row(layer="qwen3-30b-a3b", num_tokens=1, kernel="piecegraph", setting="", us=us, bytes_to_read=4.08e6)


def test_bytes_are_those_of_the_experts_hit_and_of_the_tokens() -> None:
    assert bytes_to_read(QWEN3, 1, 8, 2) == 8 * 3 * 2048 * 768 * 2 + 2 * 2048 * 2


def test_the_share_is_of_the_floor() -> None:
    assert row(2.0).floor_us == pytest.approx(1.0)
    assert row(2.0).share == pytest.approx(0.5)
    assert row(None).share is None
    assert json.loads(json.dumps(as_data(row(2.0))))["share"] == pytest.approx(0.5)


@pytest.mark.parametrize("num_tokens", [1, 8, 2048])
def test_a_sweep_tries_what_is_not_the_default(num_tokens: int) -> None:
    default = moe_config(num_tokens=num_tokens, top_k=8, num_experts=128, hidden=2048, size=768)
    configs = other_configs(default)
    assert default not in configs and len(set(configs)) > 50


def test_transformers_form_is_called_as_a_model_calls_it() -> None:
    """Both ways of computing what is expected agree."""
    inputs = moe_inputs(5, 2, 4, 32, 16, dtype=torch.bfloat16)
    batch = Inputs(
        x=inputs.x, topk_weights=[inputs.topk_weights], topk_ids=[inputs.topk_ids], gate_up=[inputs.gate_up],
        down=[inputs.down],
    )  # fmt: skip
    torch.testing.assert_close(_grouped_mm_form(batch, 0).float(), _expected(batch), rtol=2e-2, atol=2e-2)
    assert batch.num_experts_hit == inputs.topk_ids.unique().numel()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 1 and "needs one" in result.output


@pytest.mark.gpu
def test_it_times_both_forms() -> None:
    result = CliRunner().invoke(main, ["--layer", "qwen3-30b-a3b", "--tokens", "1,8"])
    assert result.exit_code == 0, result.output
    assert "WRONG" not in result.output and "failed" not in result.output and "grouped_mm" in result.output
