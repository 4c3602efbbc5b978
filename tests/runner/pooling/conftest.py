"""Models that several test files pool with; each is made and compiled once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from piecegraph import LLM
from tests.runner.pooling.encoder_models import FAMILIES, save_model


@pytest.fixture(scope="session")
def bert_dir(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the folder of a tiny BERT without a head, and the model. Read only: copy the folder to change it."""
    folder = tmp_path_factory.mktemp("bert")
    return folder, save_model(FAMILIES["bert"](), folder)


@pytest.fixture(scope="session")
def bert(bert_dir: tuple[Path, Any]) -> Iterator[LLM]:
    """Return that model, loaded. A test must leave no request in it."""
    with LLM(bert_dir[0], device="cpu", compiler="eager", max_num_seqs=4) as llm:
        yield llm
        assert not llm._pooler.engine.has_unfinished


@pytest.fixture(scope="session")
def cross_encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the folder of a tiny BERT classifier with one label, and the model."""
    folder = tmp_path_factory.mktemp("cross")
    return folder, save_model(FAMILIES["bert"](), folder, num_labels=1)


@pytest.fixture(scope="session")
def cross_encoder(cross_encoder_dir: tuple[Path, Any]) -> Iterator[LLM]:
    """Return that model, loaded."""
    with LLM(cross_encoder_dir[0], device="cpu", compiler="eager", max_num_seqs=4) as llm:
        yield llm
