"""The memory of weights that a rank has at any moment of a load, not only what it holds afterwards."""

from __future__ import annotations

import gc
import json
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from piecegraph.runner.tensor_parallel.sharded_checkpoint import rank_model

CONFIG: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "tie_word_embeddings": False,
}


def write_zeros(folder: Path, model: Any) -> Path:
    """Write a safetensors file of the model's names and shapes in bfloat16, whose values take no room on a disk."""
    header: dict[str, object] = {}
    end = 0
    for name, parameter in model.state_dict().items():
        start, end = end, end + parameter.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = folder / "model.safetensors"
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + end)
    return file


def anonymous_bytes() -> int:
    """Return the memory of this process that is no view of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def peak_of(run: Callable[[], Any]) -> tuple[Any, int]:
    """Return what `run` returns, and the most memory that the process had beyond what it had before."""
    gc.collect()
    before = peak = anonymous_bytes()
    ended = threading.Event()

    def look() -> None:
        nonlocal peak
        while not ended.wait(0.001):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    result = run()
    ended.set()
    thread.join()
    return result, max(peak, anonymous_bytes()) - before


def load(folder: Path, num_layers: int) -> tuple[int, int]:
    """Load half of a model of zeros; return the bytes that it holds, and the peak."""
    config = LlamaConfig(num_hidden_layers=num_layers, **CONFIG)
    with torch.device("meta"):
        file = write_zeros(folder, LlamaForCausalLM(config))
    options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    (model, *_), peak = peak_of(lambda: rank_model(LlamaForCausalLM, config, [file], 1, 2, **options))
    return sum(parameter.nbytes for parameter in model.parameters()), peak


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_rank_never_has_more_than_its_share_and_a_twentieth(tmp_path: Path) -> None:
    """Of 544 MiB of weights, one of two ranks holds 272 MiB."""
    load(tmp_path, 1)  # what a first load imports and allocates is no weight
    held, peak = load(tmp_path, 16)
    assert held > 270 * 2**20
    assert peak < 1.05 * held, f"{peak / 2**20:.1f} MiB at the peak, {held / 2**20:.1f} MiB held"
