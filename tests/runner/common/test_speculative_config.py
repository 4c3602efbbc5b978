"""What is drafted is checked before anything loads; names are vLLM's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piecegraph import LLM
from piecegraph.errors import ConfigError
from piecegraph.runner.common.speculative_config import UNAVAILABLE_KEYS, UNAVAILABLE_METHODS, SpeculativeConfig

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}
SYNTHETIC: dict[str, Any] = {**NGRAM, "rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("given", "shortest", "longest"),
    [
        ({}, 5, 5),
        ({"prompt_lookup_max": 3}, 3, 3),
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 4}, 1, 4),
    ],
)
def test_lengths_of_ngrams_have_vllms_defaults(given: dict[str, int], shortest: int, longest: int) -> None:
    config = SpeculativeConfig.parse({**NGRAM, **given})
    assert config is not None
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (shortest, longest)


def test_nothing_and_an_older_spelling() -> None:
    assert SpeculativeConfig.parse(None) is None
    config = SpeculativeConfig.parse({"model": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": None})
    assert config is not None and config.method == "ngram"
    assert SpeculativeConfig.parse(config) is config


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["ngram"], "must be a mapping"),
        ({"num_speculative_tokens": 2}, "names no method"),
        ({"method": "ngram"}, "has no num_speculative_tokens"),
        ({**NGRAM, "method": "ngrams"}, "Did you mean 'ngram'"),
        ({**NGRAM, "num_speculative_token": 3}, "Did you mean 'num_speculative_tokens'"),
        ({**NGRAM, "num_speculative_tokens": 0}, "from 1 to 64"),
        ({**NGRAM, "num_speculative_tokens": True}, "from 1 to 64"),
        ({**NGRAM, "num_speculative_tokens": 65}, "from 1 to 64"),
        ({**NGRAM, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "above prompt_lookup_max=2"),
        ({**NGRAM, "rejection_sample_method": "synthetic"}, "give one of the two"),
        ({**NGRAM, "synthetic_acceptance_length": 2.0}, "belong to rejection_sample_method 'synthetic'"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 9}, "a number from 1 to 5"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 0.5}, "a number from 1 to 5"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5]}, "there must be 4 numbers from 0 to 1"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6, 0.1, 0]}, "none above the one before"),
        ({**NGRAM, "rejection_sample_method": "lenient"}, "is unknown"),
        ({**NGRAM, "draft_sample_method": "probabilistic"}, "draws nothing"),
        ({**NGRAM, "model": "some/model"}, "has no draft model"),
        ({"model": "some/model"}, "has no num_speculative_tokens"),
        ({"method": "draft_model", "num_speculative_tokens": 2}, "needs the model that drafts"),
        ({"method": "draft_model", "model": 3, "num_speculative_tokens": 2}, "needs the model that drafts"),
        ({"model": "some/model", "num_speculative_tokens": 2, "prompt_lookup_max": 3}, "belongs to method .ngram."),
        ({"model": "some/model", "num_speculative_tokens": 0}, "from 1 to 64"),
    ],
)
def test_what_cannot_be_is_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.parse(value)


def head_folder(folder: Path, **written: Any) -> str:
    """A folder with a config.json as the speculators library writes it."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
    config = {"speculators_model_type": "eagle3", "speculators_config": {"proposal_methods": [proposal]}, **written}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_folder_without_a_method_says_what_it_is(tmp_path: Path) -> None:
    """A head drafts as one, as many tokens as it was made for; everything else is a model that drafts."""
    config = SpeculativeConfig.parse({"model": head_folder(tmp_path)})
    assert config is not None and (config.method, config.num_speculative_tokens) == ("eagle3", 5)
    config = SpeculativeConfig.parse({"model": head_folder(tmp_path), "num_speculative_tokens": 2})
    assert config is not None and (config.method, config.num_speculative_tokens) == ("eagle3", 2)
    for kind, text in (("dflash", "DFlash drafts are not available"), ("another", "method='another' is unknown")):
        with pytest.raises(ConfigError, match=text):
            SpeculativeConfig.parse({"model": head_folder(tmp_path, speculators_model_type=kind)})
    for written in ('{"model_type": "llama"}', "[]", "{"):
        (tmp_path / "config.json").write_text(written)
        config = SpeculativeConfig.parse({"model": str(tmp_path), "num_speculative_tokens": 2})
        assert config is not None and config.method == "draft_model"


@pytest.mark.parametrize("proposals", [None, [], [3], [{}], [{"speculative_tokens": "5"}]])
def test_a_head_that_names_no_number_needs_one(tmp_path: Path, proposals: object) -> None:
    folder = head_folder(tmp_path, speculators_config={"proposal_methods": proposals})
    with pytest.raises(ConfigError, match="has no num_speculative_tokens"):
        SpeculativeConfig.parse({"model": folder})


@pytest.mark.parametrize("method", UNAVAILABLE_METHODS)
def test_methods_that_are_not_here_are_refused_by_name(method: str) -> None:
    with pytest.raises(ConfigError, match=f"method='{method}'"):
        SpeculativeConfig.parse({"method": method})


@pytest.mark.parametrize("key", UNAVAILABLE_KEYS)
def test_keys_that_nothing_reads_are_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' is not available here"):
        SpeculativeConfig.parse({**NGRAM, key: 1})


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"logits_processors": ["piecegraph.runner.common.logits_processor:LogitsProcessor"]}, "logits_processors"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds"),
        ({"compilation_config": {"selfcheck": True}}, "selfcheck"),
    ],
)
def test_impossible_mixes_are_refused_before_a_model_is_looked_for(others: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("no/such/model", speculative_config=NGRAM, **others)
