"""What is kept of a model in the cache directory: added up, readable by others, never an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.cudagraphs.measured_times import MeasuredTimes
from piecegraph.runner.traffic.kept import Kept, add_to_kept, kept_key, read_all, read_kept

KEY = "a" * 64
TIMES = MeasuredTimes({(CUDAGraphMode.PIECEWISE, BatchDescriptor(num_tokens=8)): 0.5}, {8: 1.0})


def test_counts_add_up_and_times_are_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "traffic"
    assert read_kept(folder, KEY) == Kept(key=KEY)
    assert add_to_kept(folder, Kept(key=KEY, model="a", device="cpu", decode={1: 2, 3: 4}, times=TIMES))
    assert add_to_kept(folder, Kept(key=KEY, model="a", device="cpu", decode={3: 1}, mixed={7: 1}))
    expected = Kept(key=KEY, model="a", device="cpu", decode={1: 2, 3: 5}, mixed={7: 1}, times=TIMES)
    assert read_kept(folder, KEY) == expected and read_all(folder) == [expected]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 0}', '{"format": 1, "model": "a"}'])
def test_a_damaged_file_counts_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / f"{KEY}.json").write_text(text)
    assert read_kept(tmp_path, KEY) == Kept(key=KEY)
    assert add_to_kept(tmp_path, Kept(key=KEY, decode={1: 1})) and read_kept(tmp_path, KEY).decode == {1: 1}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not add_to_kept(tmp_path / "file" / "traffic", Kept(key=KEY, decode={1: 1}))
    assert read_all(tmp_path / "file" / "traffic") == []


def test_the_key_is_the_model_and_not_its_place() -> None:
    config, moved = LlamaConfig(), LlamaConfig()
    moved._name_or_path = "elsewhere"
    cpu = torch.device("cpu")
    key = kept_key(config, torch.float32, cpu)
    assert key == kept_key(moved, torch.float32, cpu)
    others = [
        kept_key(LlamaConfig(num_hidden_layers=3), torch.float32, cpu),
        kept_key(config, torch.bfloat16, cpu),
        kept_key(config, torch.float32, torch.device("cuda")),
    ]
    assert len({key, *others}) == 4
