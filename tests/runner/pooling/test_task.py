"""Whether a model generates or pools is decided by arguments first, then by its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piecegraph.errors import ConfigError
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.pooling.task import PoolingTask, pooling_task

EMBED, CLASSIFY = PoolingTask.EMBED, PoolingTask.CLASSIFY


def task(folder: Path, **options: Any) -> PoolingTask | None:
    """The task of the model in `folder`."""
    overrides = options.pop("hf_overrides", {})
    return pooling_task(EngineConfig(source=ModelSource(model=str(folder), hf_overrides=overrides), **options))


def write(folder: Path, architecture: str | None) -> Path:
    """Write a config that names `architecture`."""
    (folder / "config.json").write_text(json.dumps({"architectures": architecture and [architecture]}))
    return folder


@pytest.mark.parametrize(
    ("architecture", "found"),
    [
        ("LlamaForCausalLM", None),
        ("GPT2LMHeadModel", None),
        (None, None),
        ("BertModel", EMBED),
        ("ModernBertForMaskedLM", EMBED),
        ("RobertaForSequenceClassification", CLASSIFY),
    ],
)
def test_architectures(architecture: str | None, found: PoolingTask | None, tmp_path: Path) -> None:
    folder = write(tmp_path, architecture)
    assert task(folder) is found
    assert task(folder, runner="generate") is None
    assert task(folder, runner="pooling") is (found or EMBED)
    assert task(folder, convert="embed") is EMBED
    (folder / "modules.json").write_text("[]")
    assert task(folder) is (CLASSIFY if found is CLASSIFY else EMBED)


def test_overrides_count(tmp_path: Path) -> None:
    folder = write(tmp_path, "LlamaForCausalLM")
    assert task(folder, hf_overrides={"architectures": ["LlamaForSequenceClassification"]}) is CLASSIFY


def test_contradictions_and_damaged_files(tmp_path: Path) -> None:
    """A damaged config is left to loading, which says what is wrong with it."""
    folder = write(tmp_path, "BertModel")
    with pytest.raises(ConfigError, match="runner='generate' and convert='embed' contradict each other"):
        task(folder, runner="generate", convert="embed")
    (folder / "config.json").write_text("{")
    assert task(folder) is None
    assert task(tmp_path / "nowhere") is None
