"""Ranks that torchrun has started, or that the environment describes as if it had."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from piecegraph import LLM, environment
from piecegraph.errors import ConfigError
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.tiny_models import make_model, save

PROGRAM = """
import json, os, sys
from pathlib import Path
from piecegraph import LLM, SamplingParams
from piecegraph.errors import WorkerError

def leave(worker):
    raise ValueError("planted")

folder, out = sys.argv[1:]
found = []
for _ in range(2):  # two engines of one program do not meet each other's ranks
    llm = LLM(
        folder, skip_tokenizer_init=True, dtype="float32", compiler="eager", device="cpu", max_num_seqs=4,
        num_kv_blocks=32, tensor_parallel_size=2, distributed_executor_backend="external_launcher",
        distributed_timeout_seconds=120,
    )
    outputs = llm.generate([[5, 17, 3], [9]], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    found.append([list(output.outputs[0].token_ids) for output in outputs])
    (report,) = llm.collective_rpc("report")
    try:
        llm.collective_rpc(leave)
    except ValueError:
        pass
    try:
        llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)
    except WorkerError as error:
        message = str(error)
    llm.close()
rank = os.environ["RANK"]
Path(out, rank).write_text(json.dumps([found, report["rank"], report["kv_heads"], message]))
"""


@pytest.mark.slow
def test_ranks_under_torchrun_answer_as_one_process(tmp_path: Path) -> None:
    """Real torchrun, two ranks, two engines after each other; a rank that left a step refuses the next."""
    folder = save(make_model("llama"), tmp_path / "model")
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(PROGRAM)
    out.mkdir()
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", program, folder, out],
        check=True,
        timeout=900,
        env=environment.child_environment({}),
        stdout=subprocess.DEVNULL,
    )
    model = make_model("llama")
    for rank in range(2):
        found, told, kv_heads, message = json.loads((out / str(rank)).read_text())
        assert (told, kv_heads) == (rank, 1)
        assert message == f"rank {rank} left a step (ValueError), so the ranks are out of step."
        assert found[0] == found[1]
        for prompt, tokens in zip([[5, 17, 3], [9]], found[0], strict=True):
            assert_same_tokens(model, prompt, tokens)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "its variable RANK is not set; use torchrun"),
        ({"RANK": "one"}, "its variable RANK is 'one'"),
        ({"RANK": "0"}, "its variable WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "has started 3 ranks, and tensor_parallel_size=2 asks for another"),
    ],
)
def test_a_program_that_no_launcher_started_is_refused(
    variables: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        LLM(tmp_path, tensor_parallel_size=2, distributed_executor_backend="external_launcher")
