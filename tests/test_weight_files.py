"""Which files hold a model's weights, found without asking anything of what loads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from piecegraph.weight_files import weight_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, without weights yet."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def write(*files: Path) -> None:
    for file in files:
        file.write_bytes(b"weights")


def shard(folder: Path, *names: str) -> None:
    index = {"weight_map": {f"layer{number}": name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    write(*(folder / name for name in names))


def test_one_file(folder: Path) -> None:
    """What else lies there is not read, whatever it is called."""
    write(folder / "model.safetensors", folder / "consolidated.safetensors", folder / "tokenizer.json")
    assert weight_files(str(folder)) == (folder / "model.safetensors",)


def test_the_files_of_an_index_each_once_in_order(folder: Path) -> None:
    shard(folder, "b.safetensors", "a.safetensors", "b.safetensors")
    assert weight_files(str(folder)) == (folder / "a.safetensors", folder / "b.safetensors")


def test_one_file_goes_before_an_index(folder: Path) -> None:
    """As transformers has it."""
    shard(folder, "a.safetensors")
    write(folder / "model.safetensors")
    assert weight_files(str(folder)) == (folder / "model.safetensors",)


def test_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    assert weight_files(str(file)) == ()
    write(file)
    assert weight_files(str(file)) == (file,)


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 7}}', '{"weight_map": {"a": {}}}', "\xff"]
)
def test_an_index_that_is_none(folder: Path, index: str) -> None:
    """It is refused when the model is loaded, with what is wrong."""
    (folder / "model.safetensors.index.json").write_bytes(index.encode("latin-1"))
    assert weight_files(str(folder)) == ()


def test_what_is_no_model_has_none(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors")  # and no config.json
    assert weight_files(str(tmp_path)) == ()
    assert weight_files(str(tmp_path / "nowhere")) == ()
    assert weight_files("nobody/has-this-one") == ()


def test_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot that a branch or a tag means here, or that of the commit that is named."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    for commit, branch in (("c0ffee", "main"), ("decade", "v2")):
        (repository / "refs" / branch).write_text(commit, encoding="utf-8")
        (repository / "snapshots" / commit).mkdir(parents=True)
        write(
            repository / "snapshots" / commit / "config.json", repository / "snapshots" / commit / "model.safetensors"
        )
    for revision, commit in ((None, "c0ffee"), ("v2", "decade"), ("decade", "decade")):
        assert weight_files("owner/name", revision) == (repository / "snapshots" / commit / "model.safetensors",)
    assert weight_files("owner/name", "v3") == ()
    assert weight_files("owner/other") == ()
