"""The files that hold a model's weights are found without importing what loads them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from piecegraph.weight_files import prefetch, weight_files


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
    """Other files in the folder are not read, whatever their names."""
    write(folder / "model.safetensors", folder / "consolidated.safetensors", folder / "tokenizer.json")
    assert weight_files(str(folder)) == (folder / "model.safetensors",)


def test_the_files_of_an_index_each_once_in_order(folder: Path) -> None:
    shard(folder, "b.safetensors", "a.safetensors", "b.safetensors")
    assert weight_files(str(folder)) == (folder / "a.safetensors", folder / "b.safetensors")


def test_one_file_goes_before_an_index(folder: Path) -> None:
    """The order is that of transformers."""
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


def test_a_path_without_a_model_has_no_weight_files(tmp_path: Path) -> None:
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


def test_prefetch_reads_what_is_there_and_leaves_out_the_rest(tmp_path: Path) -> None:
    """A missing file, or a system without the call, is no reason to fail: loading reports what is wrong."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(1 << 16))
    prefetch([file, tmp_path / "missing.safetensors"])
    assert file.read_bytes() == bytes(1 << 16)


def test_prefetch_tells_the_system_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, length, advice: advised.append((offset, length, advice)))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"0")
    prefetch([file])
    assert advised == [(0, 0, os.POSIX_FADV_WILLNEED)]
