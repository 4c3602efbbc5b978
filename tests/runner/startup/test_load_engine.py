"""The order of a start: weights are read while pieces compile, and what is wrong is known before that."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from piecegraph import LLM, SamplingParams
from piecegraph.errors import CheckpointError
from piecegraph.runner.models import without_weights
from tests.runner.tiny_models import llama_config, random_model, save

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(llama_config(vocab_size=64)), tmp_path_factory.mktemp("llama"))


def answer(llm: LLM) -> list[int]:
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    with LLM(folder, skip_tokenizer_init=True, device="cpu", compiler="eager", num_kv_blocks=8) as llm:
        return answer(llm)


@pytest.mark.slow
def test_weights_are_loaded_while_pieces_compile(
    folder: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE", "off")  # else there may be nothing to compile
    phases: list[tuple[str, bool]] = []  # and whether it ended
    with LLM(
        folder,
        skip_tokenizer_init=True,
        device="cpu",
        num_kv_blocks=8,
        compile_workers=2,
        on_phase=lambda phase: phases.append((phase.name, phase.seconds is not None)),
    ) as llm:
        assert answer(llm) == expected
        assert llm.compiled.report().weights_first == ""
    assert phases.index(("model", True)) < phases.index(("trace", False))
    assert phases.index(("compile", False)) < phases.index(("load", True)) < phases.index(("compile", True))


@pytest.mark.slow
def test_a_model_that_needs_values_to_be_made_is_loaded_first(
    folder: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a model starts too, and a note says why the start took longer."""

    def load_model(*args: object, **options: object) -> None:
        torch.empty(1, device="meta").item()

    monkeypatch.setattr(without_weights, "load_model", load_model)
    with LLM(folder, skip_tokenizer_init=True, device="cpu", num_kv_blocks=8, compile_workers=1) as llm:
        assert answer(llm) == expected
        (note,) = [note for note in llm.notes if note.startswith("weights were loaded before anything was compiled")]
    assert "the model cannot be constructed without values: RuntimeError" in note


@pytest.mark.parametrize("is_there", [True, False])
def test_weight_files_are_checked_before_the_trace(folder: Path, tmp_path: Path, is_there: bool) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    file = copy / "model.safetensors"
    content = file.read_bytes()
    file.unlink()
    if is_there:
        file.write_bytes(content[:-100])
    phases: list[str] = []
    message = "is corrupt or truncated" if is_there else "no weights to read at"
    with pytest.raises(CheckpointError, match=message):
        LLM(copy, skip_tokenizer_init=True, device="cpu", on_phase=lambda phase: phases.append(phase.name))
    assert "trace" not in phases
