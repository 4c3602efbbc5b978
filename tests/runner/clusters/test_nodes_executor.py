"""Ranks of two machines, both played by this one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from piecegraph import LLM, environment
from piecegraph.errors import ConfigError, WorkerError
from piecegraph.runner.clusters.node import Nodes, serve_node_as
from piecegraph.runner.distributed.executor import MpExecutor
from tests.runner.data_parallel.test_engine_processes import assert_gone
from tests.runner.distributed.test_executor import GREEDY, PROMPTS, assert_answers, pid_of, two_ranks
from tests.runner.tiny_models import make_model, save

PROGRAM = [sys.executable, "-m", "piecegraph"]


two_gpus = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"),
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=two_gpus)])
def test_two_machines_answer_as_one_until_a_rank_is_killed(device: str, tmp_path: Path) -> None:
    """Two ranks; the second machine runs the command with --node-rank 1, which fails when a rank of it does.

    Each machine's first GPU is another one of this machine.
    """
    folder = save(make_model("llama"), tmp_path)
    port = free_port()
    flags = ["--nnodes", "2", "--node-rank", "1", "--master-port", str(port), "--tensor-parallel-size", "2"]
    other = subprocess.Popen(
        [*PROGRAM, "run", str(folder), "unread", *flags],
        env=environment.child_environment({"CUDA_VISIBLE_DEVICES": "1"} if device == "cuda" else {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    llm = two_ranks(folder, size=2, nnodes=2, master_port=port, device=device)
    try:
        assert_answers(llm, "llama")
        pids = llm.collective_rpc(pid_of)
        executor = llm._executor
        assert isinstance(executor, MpExecutor)
        assert executor.pids == tuple(pids[1:])
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=rf"rank 1 \(process {pids[1]}\) ended with exit code -9"):
            llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY, use_tqdm=False)
    finally:
        llm.close()
    _, shown = other.communicate(timeout=120)
    assert other.returncode == 1
    assert "ended with exit code -9; rank 0 says why" in shown
    assert_gone(pids[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nnodes": 2, "node_rank": 2}, "node_rank=2; it must be from 0 to nnodes - 1, 1"),
        ({"nnodes": 2, "node_rank": 1, "tensor_parallel_size": 2}, "machines other than 0 only run ranks"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "tensor_parallel_size=3 cannot be divided among nnodes=2"),
        ({"nnodes": 2, "data_parallel_size": 2, "tensor_parallel_size": 2}, "one engine and one stage"),
        ({"master_port": 70_000}, "master_port=70000; it must be at most 65535"),
        ({"master_addr": ""}, "it must be the address of machine 0"),
    ],
)
def test_machines_that_cannot_share_the_ranks_are_refused(
    arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tmp_path, **arguments)  # type: ignore[arg-type]


def test_ranks_are_divided_in_the_order_of_machines() -> None:
    nodes = [Nodes(nnodes=3, node_rank=rank, master_addr="a", master_port=1) for rank in range(3)]
    assert [list(node.ranks(6)) for node in nodes] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"node_rank": 2, "nnodes": 2, "tensor_parallel_size": 2}, "node_rank=2; it must be from 0 to"),
        ({"node_rank": 1, "nnodes": 2, "tensor_parallel_size": 3}, "3 ranks cannot be divided among nnodes=2"),
    ],
)
def test_a_machine_refuses_numbers_that_do_not_fit(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve_node_as(arguments)
