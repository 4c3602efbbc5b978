"""`piecegraph bench speculative`: a row without drafts and one for each method and number, from one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piecegraph.tools.cli import main
from piecegraph.tools.command_line.shapes import SHAPES
from piecegraph.tools.commands.bench_speculative import kinds
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.speculative.heads.random_heads import save_eagle3
from tests.runner.speculative.heads.test_mtp import save_with_mtp
from tests.runner.tiny_models import llama_config, random_model, save

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

FLAGS = [
    *("--compiler", "eager", "--device", "cpu", "--dtype", "float32", "--quiet", "--max-model-len", "64"),
    *("--output-tokens", "12", "--repeat", "1", "--prompt", "abcabc", "--num-speculative-tokens", "2"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(random_model(llama_config(vocab_size=261)), tmp_path_factory.mktemp("bench"))
    byte_tokenizer().save_pretrained(str(folder))
    return folder


@pytest.mark.slow
def test_rows_stand_beside_each_other(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that drafts for itself gives all but the first of 12 tokens in 4 steps; each draws its drafts once."""
    head = save_eagle3(random_model(llama_config(vocab_size=261)), tmp_path)
    drafts = ["--draft", str(folder), "--eagle3", str(head)]
    assert main(["bench", "speculative", str(folder), *drafts, "--json", *FLAGS]) == 0
    record = json.loads(capsys.readouterr().out)
    ran = [(row["method"], row["num_speculative_tokens"]) for row in record["rows"]]
    assert ran == [("none", 0), ("ngram", 2), ("draft_model", 2), ("eagle3", 2)]
    assert all(row["tokens_per_s"] > 0 and row["output_tokens"] == 12 for row in record["rows"])
    assert record["rows"][0]["acceptance_rate"] is None and record["rows"][2]["acceptance_rate"] == 1.0
    assert [row["steps"] for row in record["rows"][::2]] == [{"NONE": 12}, {"NONE": 5}]
    assert record["rows"][2]["draft_passes_without_a_graph"] == 5 and record["rows"][2]["draft_graphs"] == 0
    assert all(row["ms_per_step"] > 0 for row in record["rows"])


@pytest.mark.slow
def test_a_models_own_layer_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_with_mtp("GLM-4.5", tmp_path)
    byte_tokenizer().save_pretrained(str(tmp_path))
    assert main(["bench", "speculative", str(tmp_path), "--mtp", *FLAGS]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["none", "ngram", "mtp"]


@pytest.mark.slow
def test_shapes_draft_for_a_shape(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of random weights, by given acceptance, for as many requests as are asked for."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny = {**SHAPES["llama-8b"], **sizes, "head_dim": 8, "vocab_size": 200, "num_hidden_layers": 7}
    monkeypatch.setitem(SHAPES, "llama-8b", {**tiny, "eos_token_id": 2, "bos_token_id": 1})
    flags = [
        *FLAGS[: FLAGS.index("--max-model-len")],
        "--max-model-len",
        "96",
        "--output-tokens",
        "10",
        "--repeat",
        "1",
    ]
    flags += ["--draft", "shape:llama-8b:3", "--eagle3", "shape:llama-8b", "--synthetic-acceptance-length", "2"]
    flags += ["--num-requests", "2", "--num-speculative-tokens", "3"]
    assert main(["bench", "speculative", "shape:llama-8b", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["none", "ngram", "draft_model", "eagle3"]
    assert all(line.endswith("synthetic acceptance") for line in lines[1:])


@pytest.mark.slow
def test_the_table_has_the_speed_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speculative", str(folder), *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "speed-up" in lines[0] and lines[1].split()[0] == "none" and lines[2].split()[0] == "ngram"


@pytest.mark.parametrize("flags", [["--speculative-config", "{}"], ["--num-speculative-tokens", "0"]])
def test_what_the_bench_sets_itself_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert main(["bench", "speculative", str(folder), *FLAGS, *flags]) in (2, 3)
    assert "speculative" in capsys.readouterr().err


def test_a_number_of_requests_is_for_random_prompts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speculative", str(folder), *FLAGS, "--num-requests", "2"]) == 3
    assert "give --prompt several times" in capsys.readouterr().err


def test_each_method_has_each_number() -> None:
    assert [one["num_speculative_tokens"] for one in kinds("draft", (1, 3))] == [1, 3, 1, 3]
    assert [one["method"] for one in kinds(None, (1,))] == ["ngram"]
    heads = kinds(None, (2,), eagle3="head", mtp=True)
    assert [(one["method"], one.get("model")) for one in heads] == [("ngram", None), ("eagle3", "head"), ("mtp", None)]


def test_synthetic_acceptance_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the figure, whose answers were not compared."""
    flags = ["--draft", str(folder), "--synthetic-acceptance-length", "2"]
    assert main(["bench", "speculative", str(folder), *FLAGS, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("synthetic acceptance") for line in lines[1:4]] == [False, True, True]
    assert lines[3].split()[0] == "draft_model" and "2.00" in lines[3]
