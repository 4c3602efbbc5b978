"""Several engines in real processes answer as one does, and end together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from piecegraph import LLM, SamplingParams
from piecegraph.errors import ConfigError, ModelError, UsageError, WorkerError
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.data_parallel import engine_processes
from piecegraph.runner.data_parallel.engine_processes import EngineProcesses
from piecegraph.runner.distributed.protocol import IDLE_LOOK_S
from tests.runner.distributed.sleeping_ranks import sleeping_child
from tests.runner.distributed.test_executor import SLOW_MACHINE_S, is_there, pid_of, tensor_of
from tests.runner.tiny_models import make_model, save

PROMPTS = [{"prompt_token_ids": [number + 1, 5, 17, 3]} for number in range(7)]
PARAMS = [
    SamplingParams(temperature=float(number % 2), max_tokens=8, logprobs=1 if number == 3 else None)
    for number in range(7)
]


def engines(folder: Path, size: int, **options: object) -> LLM:
    arguments = {"distributed_timeout_seconds": SLOW_MACHINE_S, "device": "cpu", "compiler": "eager", **options}
    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        data_parallel_size=size,
        max_num_seqs=4,
        num_kv_blocks=32,
        **arguments,  # type: ignore[arg-type]
    )


def answers(llm: LLM) -> list[tuple[list[int], object]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(list(output.outputs[0].token_ids), output.outputs[0].logprobs) for output in outputs]


def assert_gone(pids: Iterable[int]) -> None:
    """Check that processes end; ranks of an engine do so by themselves when it has ended."""
    deadline = time.monotonic() + SLOW_MACHINE_S
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"processes {running} still run"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Return whether a process exists and is more than an entry that its parent has not read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_idly(look: Callable[[], object]) -> None:
    """Wait for requests that do not come, as a server does; `look` raises once something has ended."""
    deadline = time.monotonic() + SLOW_MACHINE_S
    while time.monotonic() < deadline:
        look()
        time.sleep(0.05)


def pids_of(llm: LLM) -> tuple[int, ...]:
    assert isinstance(llm._executor, EngineProcesses)
    return llm._executor.pids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_two_engines_answer_as_one(name: str, tmp_path: Path) -> None:
    """Greedy and sampled, without seeds too; then calls, a stream that ends early, and an engine that hangs."""
    folder = save(make_model(name), tmp_path)
    with engines(folder, 1) as llm:
        expected = answers(llm)
    with engines(folder, 2, distributed_timeout_seconds=20) as llm:
        pids = pids_of(llm)
        assert [tokens for tokens, _ in answers(llm)] == [tokens for tokens, _ in expected]
        if name != "llama":
            return
        assert llm.collective_rpc(pid_of) == list(pids)
        assert [each.tolist() for each in llm.collective_rpc(tensor_of)] == [[0, 1, 2], [0, 1, 2]]
        assert llm.report.num_pieces > 0
        assert llm.max_num_seqs == 8
        with pytest.raises(UsageError, match="the model runner with them"):
            _ = llm.runner
        for output in llm.stream(PROMPTS[:3], SamplingParams(temperature=0.0, max_tokens=40)):
            assert output.outputs[0].token_ids
            break  # the others are aborted
        assert llm.engine.num_unfinished == 0
        assert llm.reset_prefix_cache()
        os.kill(pids[1], signal.SIGSTOP)
        message = "engine 1 did not answer within 20 s. The other engines were ended"
        for _ in range(2):
            with pytest.raises(WorkerError, match=message):
                answers(llm)
        assert not any(map(is_there, pids))
    with pytest.raises(ModelError):
        engines(tmp_path / "nothing", 2)


@pytest.mark.slow
def test_engines_have_ranks_and_a_rank_that_dies_ends_all(tmp_path: Path) -> None:
    """Two engines of two ranks each."""
    folder = save(make_model("llama"), tmp_path)
    with engines(folder, 1) as llm:
        expected = answers(llm)
    with engines(folder, 2, tensor_parallel_size=2) as llm:
        assert [tokens for tokens, _ in answers(llm)] == [tokens for tokens, _ in expected]
        ranks = llm.collective_rpc(pid_of)
        assert (ranks[0], ranks[2]) == pids_of(llm)
        os.kill(ranks[3], signal.SIGKILL)  # while nothing runs
        message = r"engine 1 .*exit code 1\) failed: .*rank 1 .* exit code -9"
        with pytest.raises(WorkerError, match=message):
            wait_idly(llm.use_idle_moment)
        with pytest.raises(WorkerError, match=message):
            answers(llm)
        assert_gone(ranks)


def test_an_engine_that_ends_while_nothing_runs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its number and exit code; the others are ended then."""
    monkeypatch.setattr(engine_processes, "start_child", lambda module, role, number, *_: sleeping_child(role, number))
    processes = EngineProcesses(EngineConfig(source=ModelSource(model="a/b"), data_parallel_size=2))
    try:
        pids = processes.pids
        assert processes.check_idle() == IDLE_LOOK_S
        os.kill(pids[1], signal.SIGKILL)
        message = rf"engine 1 \(process {pids[1]}\) ended with exit code -9. The other engines were ended"
        with pytest.raises(WorkerError, match=message):
            wait_idly(processes.check_idle)
        with pytest.raises(WorkerError, match=message):
            processes.send(0, "add")
        assert not any(map(is_there, pids))
    finally:
        processes.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size=0; it must be a whole number, 1 or more"),
        ({"data_parallel_size": 2, "runner": "pooling"}, "runner='pooling' is not yet available with data_parallel"),
        (
            {"data_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
            "distributed_executor_backend='external_launcher' is not yet available with data_parallel_size=2",
        ),
    ],
)
def test_what_engines_cannot_do_is_refused_before_any_starts(
    arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tmp_path, **arguments)  # type: ignore[arg-type]
