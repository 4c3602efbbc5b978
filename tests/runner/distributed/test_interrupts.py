"""Ctrl-C ends all processes of a command with several ranks: `tools/cli.py` over `runner/distributed/`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from piecegraph import environment
from tests.runner.data_parallel.test_engine_processes import assert_gone, is_running
from tests.runner.tiny_models import llama_config, random_model, save

PROGRAM = [sys.executable, "-m", "piecegraph"]


def descendants(pid: int) -> list[int]:
    """Return all processes below `pid`."""
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(one for child in children for one in descendants(child))]


@pytest.mark.slow
@pytest.mark.parametrize("is_loading", [True, False], ids=["while loading", "in a step"])
def test_ctrl_c_ends_every_process(is_loading: bool, llama_dir: Path, tmp_path: Path) -> None:
    """The interrupt comes when the other rank has begun to load, or when the answer has begun."""
    folder = save(random_model(llama_config(vocab_size=261, max_position_embeddings=8192)), tmp_path)
    for file in llama_dir.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    command = [*PROGRAM, "run", str(folder), "the end", "--no-chat", "--compiler", "eager", "--ignore-eos"]
    command += ["--tensor-parallel-size", "2", "--device", "cpu", "--max-tokens", "8000"]
    process = subprocess.Popen(
        command, env=environment.child_environment({}), stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert process.stdout is not None
    if is_loading:
        while (
            not (others := descendants(process.pid))
            or "libtorch_cpu" not in Path(f"/proc/{others[0]}/maps").read_text()
        ):
            assert process.poll() is None, "the command has ended"
            time.sleep(0.02)
    else:
        process.stdout.read(1)
        others = descendants(process.pid)
    assert len(others) == 1
    assert all(map(is_running, others))
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(120) == 130
    assert_gone(others)
    assert not (is_loading and rest)
