"""A program that prints the memory that loading a folder takes at its most: `peak_memory.py FOLDER SMALL QUANTIZATION`.

It prints two numbers of bytes: of the process's own memory, files that are mapped not counted, beyond what it had when
it began to load, and of the parameters of the loaded model, which is in bfloat16 where it has floats. SMALL is a folder
that is loaded first. QUANTIZATION may be `-`, for what the checkpoint says.
"""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import torch

from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.load import LoadedModel, load_model


def own_bytes() -> int:
    """Return the anonymous memory of this process; proc(5)."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, "Linux says so since 4.5"
    return 1024 * int(found[1])


def load(folder: str, quantization: str | None) -> LoadedModel:
    source = ModelSource(model=folder)
    return load_model(
        source, load_config(source), dtype=torch.bfloat16, device=torch.device("cpu"), quantization=quantization
    )


def main(folder: str, small_folder: str, quantization: str) -> None:
    """Load the small model first, which imports and allocates what every load does."""
    scheme = None if quantization == "-" else quantization
    load(small_folder, scheme)
    before, peak, is_over = own_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.001):
            peak = max(peak, own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    loaded = load(folder, scheme)
    is_over.set()
    watcher.join()
    peak = max(peak, own_bytes())
    sys.stdout.write(f"{peak - before} {sum(each.nbytes for each in loaded.model.parameters())}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
