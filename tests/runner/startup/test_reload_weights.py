"""An engine that runs is given other weights, and answers as one that was made with them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import LLM, SamplingParams
from piecegraph.errors import CheckpointError, ConfigError, PiecegraphError, UsageError
from piecegraph.runner.startup import reload_weights as reload_weights_module
from piecegraph.runner.startup.loaded import Loaded
from piecegraph.runner.startup.reload_weights import (
    RankWeights,
    read_rank_weights,
    reload_on_ranks,
    write_rank_weights,
)
from tests.runner.tiny_models import llama_config, random_model, save

PROMPT = {"prompt_token_ids": list(range(5, 25))}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "compiler": "eager",
    "graph_kind": "recorded",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "cudagraph_capture_sizes": (1, 2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of a model."""
    config = llama_config(tie_word_embeddings=True)
    return [save(random_model(config, seed), tmp_path_factory.mktemp(f"version{seed}")) for seed in (0, 1)]


@pytest.fixture(scope="module")
def llm(folders: list[Path]) -> Iterator[LLM]:
    """Return an `LLM` that runs under graphs and has merged projections."""
    with LLM(folders[0], **OPTIONS) as made:
        assert any(row.name == "merge-projections" and row.matches for row in made.compiled.report().passes)
        yield made


@pytest.fixture(autouse=True)
def first_version(llm: LLM) -> None:
    llm.reload_weights()


def answer(llm: LLM) -> tuple[int, ...]:
    return tuple(llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.fixture(scope="module")
def answers(folders: list[Path]) -> list[tuple[int, ...]]:
    """Return the answers of an `LLM` for each version of the model."""
    found = []
    for folder in folders:
        with LLM(folder, **OPTIONS) as made:
            found.append(answer(made))
    assert found[0] != found[1]
    return found


def state(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    loaded: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return loaded


@pytest.mark.parametrize("given", ["folder", "mapping", "pairs", "another dtype"])
def test_reloaded_weights_answer_like_a_new_llm_with_them(
    given: str, llm: LLM, folders: list[Path], answers: list[tuple[int, ...]]
) -> None:
    """Cached prefixes are of the old weights and are not used."""
    assert answer(llm) == answers[0]
    new = state(folders[1])
    weights: Any = {
        "folder": str(folders[1]),
        "mapping": new,
        "pairs": iter(new.items()),
        "another dtype": {name: tensor.double() for name, tensor in new.items()},
    }[given]
    assert llm.reload_weights(weights) == len(new)
    assert answer(llm) == answers[1]
    llm.reload_weights()
    assert answer(llm) == answers[0]


def test_some_of_the_tensors_may_be_given(llm: LLM, folders: list[Path], answers: list[tuple[int, ...]]) -> None:
    new = state(folders[1])
    names = sorted(new)
    llm.reload_weights({name: new[name] for name in names[::2]})
    assert answer(llm) != answers[1]
    llm.reload_weights((name, new[name]) for name in names[1::2])
    assert answer(llm) == answers[1]


def test_nothing_is_written_if_a_tensor_does_not_fit(
    llm: LLM, folders: list[Path], answers: list[tuple[int, ...]], tmp_path: Path
) -> None:
    new = state(folders[1])
    good = "model.norm.weight"
    for name, tensor, message in [
        ("model.norm.wait", new[good], r"no tensor 'model\.norm\.wait'\..*model\.norm\.weight"),
        (good, new[good][1:], r"model\.norm\.weight has shape \(31,\); the model's is \(32,\)"),
        (good, new[good].long(), "cannot be converted to the model's torch.float32"),
        (good, new[good].to("meta"), "without values"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            llm.reload_weights({**new, name: tensor})
    other = save(random_model(llama_config(tie_word_embeddings=True, rms_norm_eps=1e-3)), tmp_path)
    with pytest.raises(ConfigError, match="differs .* in rms_norm_eps"):
        llm.reload_weights(other)
    assert answer(llm) == answers[0]


def test_a_failed_iterable_reports_what_was_written_before(llm: LLM, folders: list[Path]) -> None:
    new = state(folders[1])
    pairs = [*list(new.items())[:2], ("nothing", torch.zeros(1))]
    with pytest.raises(CheckpointError, match="2 tensors before it were written"):
        llm.reload_weights(iter(pairs))


def test_weights_are_not_reloaded_while_requests_run(llm: LLM, answers: list[tuple[int, ...]]) -> None:
    llm.engine.add_request("runs", PROMPT["prompt_token_ids"], PARAMS)
    llm.engine.step()
    with pytest.raises(UsageError, match="1 requests are unfinished"):
        llm.reload_weights()
    llm.engine.abort("runs")
    llm.reload_weights()
    assert answer(llm) == answers[0]


@pytest.fixture(scope="module")
def drafted(folders: list[Path]) -> Iterator[LLM]:
    """The first version, for which it drafts itself."""
    drafts = {"model": str(folders[0]), "num_speculative_tokens": 2}
    with LLM(folders[0], attention_backend="triton", speculative_config=drafts, **OPTIONS) as made:
        yield made


def acceptance(llm: LLM) -> float:
    """The share of drafts that are accepted of another answer."""
    before = llm.engine.stats.speculation
    answer(llm)
    after = llm.engine.stats.speculation
    assert before is not None and after is not None
    return (after.num_accepted_tokens - before.num_accepted_tokens) / (after.num_draft_tokens - before.num_draft_tokens)


def test_a_draft_is_given_other_weights(drafted: LLM, folders: list[Path], answers: list[tuple[int, ...]]) -> None:
    """By name; or it keeps its own, which then draft badly and change no answer; or both models' own files again."""
    num_tensors = len(state(folders[1]))
    assert answer(drafted) == answers[0] and acceptance(drafted) == 1
    assert drafted.reload_weights(folders[1]) == num_tensors
    assert answer(drafted) == answers[1] and acceptance(drafted) < 1
    assert drafted.reload_weights(state(folders[1]), draft_weights=folders[1]) == 2 * num_tensors
    assert answer(drafted) == answers[1] and acceptance(drafted) == 1
    assert drafted.reload_weights() == 2 * num_tensors
    assert answer(drafted) == answers[0] and acceptance(drafted) == 1


def test_weights_that_do_not_fit_a_draft_leave_both_models_as_they_are(
    drafted: LLM, folders: list[Path], answers: list[tuple[int, ...]]
) -> None:
    drafted.reload_weights()
    for weights, message in (
        ({"model.norm.weigth": torch.ones(1)}, "the draft model has no tensor 'model.norm.weigth'"),
        ({"model.norm.weight": torch.ones(3)}, "the draft model's model.norm.weight has shape"),
    ):
        with pytest.raises(CheckpointError, match=message):
            drafted.reload_weights(folders[1], draft_weights=weights)
    assert answer(drafted) == answers[0] and acceptance(drafted) == 1


def test_weights_for_no_draft_are_refused(llm: LLM, folders: list[Path]) -> None:
    with pytest.raises(UsageError, match="no model drafts here .speculative_config.; leave them out"):
        llm.reload_weights(draft_weights=folders[1])


def rank_weights(rank: int, digest: str = "d1", error: PiecegraphError | None = None) -> RankWeights:
    return RankWeights(rank=rank, pid=100 + rank, error=error, digest=digest)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([rank_weights(0), rank_weights(1, "d2")], r"rank 1 \(process 101\) has read other weight files than rank 0 "),
        ([rank_weights(0), rank_weights(1, "", CheckpointError("a reason"))], "a reason"),
    ],
)
def test_nothing_is_written_unless_all_ranks_have_read_the_same(
    parts: list[RankWeights], message: str, llm: LLM
) -> None:
    told: list[tuple[str, Sequence[Any]]] = []

    def call(name: str, arguments: Sequence[Any]) -> list[Any]:
        told.append((name, arguments))
        return parts if name == "read_weights" else [[], []]

    with pytest.raises(CheckpointError, match=message):
        reload_on_ranks(llm.engine, call, None, None)
    assert told == [("read_weights", (None,)), ("write_weights", (False,))]


def test_files_that_change_while_a_rank_reads_them_are_refused(
    llm: LLM, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(folders[1], tmp_path / "copy")
    loaded = llm._generator
    assert isinstance(loaded, Loaded)
    error, digest = read_rank_weights(loaded, folder)
    assert error is None and digest and write_rank_weights(loaded, False) == [] and not loaded.incoming
    checked = reload_weights_module._checked

    def change_afterwards(*arguments: Any) -> Any:
        read = checked(*arguments)
        (file,) = folder.glob("*.safetensors")
        file.write_bytes(file.read_bytes() + b"x")
        return read

    monkeypatch.setattr(reload_weights_module, "_checked", change_afterwards)
    error, _ = read_rank_weights(loaded, folder)
    assert "have changed while they were read" in str(error) and not loaded.incoming


def test_ranks_are_told_an_absolute_folder(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may be in another directory, where a relative one is another, or none."""
    (tmp_path / "version 2").mkdir()
    monkeypatch.chdir(tmp_path)
    told: list[Sequence[Any]] = []

    def call(name: str, arguments: Sequence[Any]) -> list[Any]:
        told.append(arguments)
        return [rank_weights(0)] if name == "read_weights" else [["a"]]

    assert reload_on_ranks(llm.engine, call, "version 2", None) == 1
    assert told[0] == (str(tmp_path / "version 2"),)
    reload_on_ranks(llm.engine, call, "organisation/name", None)
    assert told[2] == ("organisation/name",)
