"""A text may be as long as the model's positions go, scaled ones included."""

from __future__ import annotations

import pytest

from piecegraph.errors import ConfigError
from piecegraph.runner.models.config.length import model_length
from tests.runner.tiny_models import FAMILIES, MAX_LEN, llama_config


def rope(kind: str, **options: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **options}}


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, MAX_LEN),
        (rope("linear"), 4 * MAX_LEN),
        (rope("yarn", original_max_position_embeddings=MAX_LEN), 4 * MAX_LEN),
        (rope("yarn", original_max_position_embeddings=MAX_LEN // 4), MAX_LEN),
    ],
)
def test_position_limit_follows_the_config(options: dict[str, object], limit: int) -> None:
    config = llama_config(**options)
    assert model_length(config, None) == limit
    assert model_length(config, 10) == 10
    with pytest.raises(ConfigError, match=f"max_model_len={limit + 1}, but the model's positions end at {limit}"):
        model_length(config, limit + 1)


def test_longrope_positions_include_the_scaling_factor() -> None:
    assert model_length(FAMILIES["phi3-longrope-long"](), None) == MAX_LEN


@pytest.mark.parametrize("factor", ["a", -2.0, float("nan"), float("inf")])
def test_a_factor_that_is_no_positive_number_is_refused(factor: object) -> None:
    config = llama_config(**rope("linear"))
    config.rope_parameters["factor"] = factor
    with pytest.raises(ConfigError, match=r"rope_parameters has factor=.*; it must be a number above 0"):
        model_length(config, None)
