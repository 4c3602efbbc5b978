"""Ranks on a Ray cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from piecegraph import LLM, environment
from piecegraph.errors import ConfigError
from piecegraph.runner.clusters.ray_executor import bundles_by_machine, reason_of_end, refuse_gpus
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.tiny_models import make_model, save

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
import ray
from piecegraph import LLM, SamplingParams
from piecegraph.errors import ConfigError, WorkerError
from piecegraph.runner.clusters import ray_executor

def start(size):
    return LLM(
        sys.argv[1], skip_tokenizer_init=True, dtype="float32", compiler="eager", device="cpu", max_num_seqs=4,
        num_kv_blocks=32, tensor_parallel_size=size, distributed_executor_backend="ray",
        distributed_timeout_seconds=120,
    )

ray.init(num_cpus=1, include_dashboard=False)
llm = start(2)
greedy = SamplingParams(temperature=0.0, max_tokens=8)
tokens = [list(one.outputs[0].token_ids) for one in llm.generate([[5, 17, 3], [9]], greedy, use_tqdm=False)]
ranks = [report["rank"] for report in llm.collective_rpc("report")]
(pid,) = llm._executor.pids
os.kill(pid, signal.SIGKILL)
try:
    llm.generate([[5]], greedy, use_tqdm=False)
except WorkerError as error:
    message = str(error)
llm.close()
ray_executor.PLACE_S = 1.0
try:
    start(3)
except ConfigError as error:
    refusal = str(error)
free = ray.available_resources().get("CPU")
Path(sys.argv[2]).write_text(json.dumps([tokens, ranks, pid, message, refusal]))
ray.shutdown()
"""


@pytest.mark.slow
def test_a_real_cluster_answers_as_one_process(tmp_path: Path) -> None:
    """A local cluster: two ranks, then one is killed; then more ranks than the cluster has room for."""
    pytest.importorskip("ray")
    folder = save(make_model("llama"), tmp_path / "model")
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(PROGRAM)
    variables = {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}  # Ray keeps a token in the home folder
    subprocess.run(
        [sys.executable, program, folder, out],
        check=True,
        timeout=900,
        env=environment.child_environment(variables),
        stdout=subprocess.DEVNULL,
    )
    tokens, ranks, pid, message, refusal = json.loads(out.read_text())
    assert ranks == [0, 1]
    assert message.startswith(f"rank 1 (process {pid}) ended: Worker unexpectedly exits")
    assert message.endswith("The other ranks were ended; make a new LLM.")
    assert "has no room for 2 ranks of one CPU each besides this process" in refusal
    model = make_model("llama")
    for prompt, found in zip([[5, 17, 3], [9]], tokens, strict=True):
        assert_same_tokens(model, prompt, found)


def test_ranks_that_are_near_are_on_one_machine() -> None:
    """This machine's bundles come first, then those of the others by address."""
    machines = {0: "b", 1: "c", 2: "a", 3: "b", 4: "a"}
    addresses = {"a": "10.0.0.3", "b": "10.0.0.2", "c": "10.0.0.1"}
    assert bundles_by_machine(machines, addresses, "a") == [2, 4, 1, 0, 3]


def test_the_reason_of_an_end_is_one_line() -> None:
    text = "The actor died.\n\tWorker exit detail: It was killed. Some common causes include: (1) memory"
    assert reason_of_end(text) == "It was killed"
    assert reason_of_end("") == "it gave no reason"


def test_ray_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'needs Ray, which is not installed: pip install "piecegraph\[ray\]"'):
        LLM(tmp_path, tensor_parallel_size=2, distributed_executor_backend="ray")


def test_gpus_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_gpus("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for device in (None, "cuda"):
        with pytest.raises(ConfigError, match="'ray' is not yet available on GPUs; give device='cpu', or leave it out"):
            refuse_gpus(device)
