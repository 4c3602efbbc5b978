"""Models that several test files share; each is made and compiled once a session."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from piecegraph import LLM, environment
from piecegraph.passes.kernels.common.cpp_kernel import NOT_LOADED
from piecegraph.runner.models.cpu_kernels import OF_EVERY_MODEL, OF_INT8
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.tiny_models import llama_config, random_model, save


@pytest.fixture(scope="session", autouse=True)
def models_of_the_runner_are_traced_once(models_are_traced_once: None) -> None:
    """Share traces in every test of this room."""


@pytest.fixture(scope="module", autouse=True)
def traces_are_not_described() -> Iterator[None]:
    """torch would describe each trace in its log while that has handlers, and pytest adds some in each phase of a test.

    With those that are there already, descriptions would go to standard error, through the logger of all of torch.
    """
    logger = logging.getLogger("torch.__trace")
    propagate, handlers = logger.propagate, list(logger.handlers)
    logger.propagate = True  # pytest adds its handlers to loggers that do not propagate
    logger.handlers.clear()
    yield
    logger.propagate = propagate
    logger.handlers[:] = [each for each in handlers if not type(each).__module__.startswith("_pytest")]


@pytest.fixture
def without_cpp_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out our C++ kernels, as the reference of a test does.

    Where a model rounds its activations to 8 bits, a difference of one in the last place can round one the other way.
    """
    monkeypatch.setenv(environment.CPU_KERNELS, "0")
    for kernel in (*OF_EVERY_MODEL, *OF_INT8):
        monkeypatch.setattr(kernel, "call", None)
        monkeypatch.setattr(kernel, "why_not", NOT_LOADED)


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    """A tiny Llama over the byte tokenizer's vocabulary; token 1 is its EOS."""
    return random_model(llama_config(vocab_size=261, eos_token_id=1))


@pytest.fixture(scope="session")
def llama_dir(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, tokenizer and chat template included. Read only: copy it to change it."""
    folder = save(llama, tmp_path_factory.mktemp("llama"))
    byte_tokenizer().save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def llm(llama_dir: Path) -> Iterator[LLM]:
    """Return that model, loaded. A test must leave no request running in it."""
    with LLM(llama_dir, dtype="float32", compiler="eager", max_num_seqs=8, num_kv_blocks=48) as llm:
        yield llm
        assert not llm.engine.has_unfinished
