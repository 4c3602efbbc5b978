"""Several processes answer as one does, and end together."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from piecegraph import LLM, LoRARequest, SamplingParams
from piecegraph.errors import CheckpointError, ConfigError, UsageError, WorkerError
from piecegraph.runner.common.logits_processor import LogitsProcessor
from piecegraph.runner.distributed.executor import MpExecutor
from piecegraph.runner.distributed.protocol import IDLE_LOOK_S
from piecegraph.runner.distributed.worker import Worker
from piecegraph.runner.startup import rank_runner
from piecegraph.runner.tensor_parallel.parallel import rank_facts
from tests.runner.distributed.compiles_of_layouts import model_of, start
from tests.runner.distributed.sleeping_ranks import SleepingRanks, kill
from tests.runner.lora.adapters import write_adapter
from tests.runner.lora.test_adapter import change
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.pipeline_parallel.stages_in_threads import llm_of_threads
from tests.runner.tiny_models import make_model, random_model, save

PROMPTS = [[5, 17, 3], [9], list(range(20, 44))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SLOW_MACHINE_S = 120.0
"""A time in which every rank gets a turn, also where many processes share few cores."""


def two_ranks(folder: Path, *, size: int = 2, compiler: str = "eager", **options: object) -> LLM:
    arguments = {"distributed_timeout_seconds": SLOW_MACHINE_S, "compile_workers": 0, "device": "cpu", **options}
    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        compiler=compiler,
        tensor_parallel_size=size,
        max_num_seqs=8,
        num_kv_blocks=48,
        **arguments,  # type: ignore[arg-type]
    )


def assert_answers(llm: LLM, name: str) -> None:
    """Check greedy tokens against transformers'."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    model = make_model(name)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)


def processes_of(llm: LLM) -> tuple[int, ...]:
    executor = llm._executor
    assert isinstance(executor, MpExecutor)
    return executor.pids


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def pid_of(worker: Worker) -> int:
    return os.getpid()


def tensor_of(worker: Worker) -> torch.Tensor:
    return torch.arange(3) + worker.rank


def raise_on_rank_1(worker: Worker) -> None:
    if worker.rank == 1:
        raise ValueError("planted")


@pytest.mark.slow
def test_two_processes_answer_as_one_until_one_is_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each reads and holds half; calls reach both; a killed one ends the call with its rank and exit code.

    Rank 1 writes nothing meanwhile, neither about its load nor about steps.
    """
    folder = save(make_model("llama"), tmp_path)
    capfd.readouterr()  # of the writing
    llm = two_ranks(folder)
    try:
        (pid,) = processes_of(llm)
        assert_answers(llm, "llama")
        reports = llm.collective_rpc("report")
        assert [report["rank"] for report in reports] == [0, 1]
        assert all(report["weight_bytes"] == report["bytes_read"] for report in reports)
        assert (reports[1]["q_heads"], reports[1]["kv_heads"]) == (2, 1)
        assert llm.collective_rpc(pid_of) == [os.getpid(), pid]
        assert [each.tolist() for each in llm.collective_rpc(tensor_of)] == [[0, 1, 2], [1, 2, 3]]
        assert tuple(capfd.readouterr()) == ("", "")
        with pytest.raises(UsageError, match="cannot be sent to another process"):
            llm.collective_rpc(lambda worker: None)
        assert llm.use_idle_moment() == IDLE_LOOK_S
        kill(pid)
        with pytest.raises(WorkerError, match=rf"rank 1 \(process {pid}\) ended with exit code -9"):
            llm.use_idle_moment()
        with pytest.raises(WorkerError, match="exit code -9"):  # and so does every later call
            llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY, use_tqdm=False)
        assert not is_there(pid)
    finally:
        llm.close()


@pytest.mark.slow
def test_two_stages_answer_as_one_process_until_one_is_killed(tmp_path: Path) -> None:
    """Each reads and holds a layer; the end of the last stage is noticed where its tokens are waited for.

    The last stage's output layer is compared with an adapter's copy of it.
    """
    folder, adapter = save(make_model("qwen3"), tmp_path / "model"), tmp_path / "adapter"
    write_adapter(make_model("qwen3"), adapter, 1, target_modules=["q_proj", "lm_head"])
    llm = two_ranks(folder, size=1, pipeline_parallel_size=2, enable_lora=True, max_lora_rank=8)
    try:
        (pid,) = processes_of(llm)
        assert_answers(llm, "qwen3")
        reports = llm.collective_rpc("report")
        assert [report["layers"] for report in reports] == [(0, 1), (1, 2)]
        llm.engine.check_lora(LoRARequest("fits", 1, str(adapter)))
        change(adapter, lambda tensors: tensors["base_model.model.lm_head.base_layer.weight"].add_(1))
        with pytest.raises(CheckpointError, match="the weight of lm_head in it is not the model's"):
            llm.engine.check_lora(LoRARequest("another base", 2, str(adapter)))
        assert all(report["weight_bytes"] == report["bytes_read"] for report in reports)
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):  # and so does every later call
            with pytest.raises(WorkerError, match=rf"rank 1 \(process {pid}\) ended with exit code -9"):
                llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY, use_tqdm=False)
        assert not is_there(pid)
    finally:
        llm.close()


def test_a_rank_that_ends_while_nothing_runs_is_noticed() -> None:
    """With its number and exit code; the others are ended then, and every later call says the same."""
    executor = SleepingRanks(3)
    try:
        pids = executor.pids
        assert executor.check_idle() == IDLE_LOOK_S
        kill(pids[1])
        message = rf"rank 2 \(process {pids[1]}\) ended with exit code -9. The other ranks were ended; make a new LLM"
        with ThreadPoolExecutor(1) as other, executor.in_step():  # a call that waits for the ranks notices it itself
            assert other.submit(executor.check_idle).result() == IDLE_LOOK_S
        for _ in range(2):
            with pytest.raises(WorkerError, match=message):
                executor.check_idle()
        with pytest.raises(WorkerError, match=message), executor.in_step():
            pass
        assert not any(map(is_there, pids))
    finally:
        executor.close()
    with pytest.raises(WorkerError, match="rank 2"):
        executor.check_idle()


def kill_and_wait(worker: Worker, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    time.sleep(SLOW_MACHINE_S)


def test_a_rank_that_ends_while_rank_0_is_busy_with_a_call_ends_the_call() -> None:
    """In the middle of what rank 0 does, which may be to read weights for minutes."""
    executor, loaded = SleepingRanks(3), SimpleNamespace(runner=None)
    try:
        pid, started = executor.pids[0], time.monotonic()
        with pytest.raises(WorkerError, match=rf"rank 1 \(process {pid}\) ended with exit code -9"):
            executor.collective_rpc(loaded, kill_and_wait, None, (pid,), {})  # type: ignore[arg-type]
        assert time.monotonic() - started < SLOW_MACHINE_S  # it was not waited for
        assert not any(map(is_there, executor.pids))
    finally:
        executor.close()


def send_signal(worker: Worker, pid: int, number: int) -> None:
    os.kill(pid, number)


@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, "exit code -9"), (signal.SIGSTOP, "did not answer within 1 s")]
)
def test_a_rank_that_is_gone_while_another_has_not_answered_ends_the_call(number: signal.Signals, message: str) -> None:
    """Rank 1 answers nothing, as if it read weights for minutes; the call has no timeout."""
    executor, loaded = SleepingRanks(3), SimpleNamespace(runner=None)
    executor._timeout_s = 1.0
    try:
        pid = executor.pids[1 if number == signal.SIGKILL else 0]
        with pytest.raises(WorkerError, match=message):
            executor.collective_rpc(loaded, send_signal, None, (pid, number), {})  # type: ignore[arg-type]
        assert not any(map(is_there, executor.pids))
    finally:
        executor.close()


def test_one_process_is_called_like_several(llm: LLM) -> None:
    assert llm.collective_rpc(pid_of) == [os.getpid()]
    assert llm.collective_rpc("report")[0]["rank"] == 0
    assert llm.use_idle_moment() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0; it must be a whole number, 1 or more"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uniproc"}, "needs a process for each rank"),
        ({"distributed_executor_backend": "gloo"}, "'gloo' is not available here"),
        ({"distributed_executor_backend": 3}, "distributed_executor_backend='3' is not available here"),
        ({"distributed_timeout_seconds": 0}, "distributed_timeout_seconds=0; it must be above 0"),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_prompt_embeds": True},
            "enable_prompt_embeds is not yet available with pipeline_parallel_size=2",
        ),
        (
            {"pipeline_parallel_size": 2, "logits_processors": [f"{LogitsProcessor.__module__}:LogitsProcessor"]},
            "logits_processors is not yet available with pipeline_parallel_size=2",
        ),
        ({"tensor_parallel_size": 2, "compile_sizes": [1]}, "compile_sizes is not yet available with"),
        ({"tensor_parallel_size": 2, "runner": "pooling"}, "runner='pooling' is not yet available with"),
        (
            {"tensor_parallel_size": 2, "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
            "speculative_config with another method than 'ngram' is not yet available with tensor_parallel_size=2",
        ),
        (
            {"pipeline_parallel_size": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config is not yet available with pipeline_parallel_size=2",
        ),
        (
            {
                "tensor_parallel_size": 2,
                "distributed_executor_backend": "external_launcher",
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
            },
            "by its own clock when drafting is slower; give 'stops_when_slower': False",
        ),
        ({"tensor_parallel_size": 2, "compilation_config": {"selfcheck": True}}, "selfcheck is not yet available with"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0; it must be a whole number, 1 or more"),
        (
            {"pipeline_parallel_size": 2, "async_scheduling": True},
            "several batches of different requests",
        ),
        (
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
            "'external_launcher' runs no stages yet",
        ),
        ({"pipeline_parallel_size": 2, "runner": "pooling"}, "not yet available with pipeline_parallel_size=2"),
        ({"enable_expert_parallel": True}, "data_parallel_size, and there is one rank"),
    ],
)
def test_what_is_not_built_is_refused_before_anything_starts(
    arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tmp_path, **arguments)  # type: ignore[arg-type]  # a folder that is no model


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("gemma3", 3), ("gemma3", 4), ("mixtral", 3)])
def test_ranks_of_a_family_answer_as_transformers_does(name: str, size: int, tmp_path: Path) -> None:
    """Greedy; then with seeds, where the tokens are those of one process."""
    folder = save(make_model(name), tmp_path)
    sampled = SamplingParams(temperature=1.0, seed=7, max_tokens=12, top_k=20, repetition_penalty=1.2, logprobs=2)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = []
    for ranks in (1, size):
        with two_ranks(folder, size=ranks, graph_kind="recorded") as llm:
            assert_answers(llm, name)
            outputs = llm.generate(prompts, sampled, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.mark.slow
def test_sums_that_are_part_of_norms_answer_as_transformers_does(tmp_path: Path) -> None:
    """Behind attention and behind experts, in eager pieces of two processes."""
    passes = ("merge-projections", "fuse-add-rms-norm", "select-rows-early", "fuse-moe", "fuse-all-reduce")
    options = {"passes": passes, "expect": {"fuse-all-reduce": "all"}}
    with two_ranks(save(make_model("qwen3-moe"), tmp_path), compilation_config=options) as llm:
        assert {row.name: row.matches for row in llm.compiled.report().passes}["fuse-all-reduce"] == 4
        assert_answers(llm, "qwen3-moe")


@pytest.mark.slow
def test_ranks_and_stages_compile_each_unique_piece_once_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an empty cache, two stages of two ranks: one rank stores what it compiles. A second start compiles nothing.

    The two stages have four different pieces of their own and share the piece of a layer.
    """
    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    model = model_of("TP 2 x PP 2")
    folder = save(model, tmp_path / "model")
    cold, warm = (start(folder, model, "TP 2 x PP 2") for _ in range(2))
    assert (cold.num_keys, cold.num_held, cold.num_compiled) == (5, 12, 5)  # a late rank may find another's plan
    assert warm == replace(cold, num_compiled=0, num_traced=0)


@pytest.mark.slow
@pytest.mark.parametrize("fact", ["version of torch", "set of weights"])
def test_a_rank_with_other_software_or_weights_is_refused_at_start(
    fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has another torch, or a file with other values."""
    folder = save(make_model("llama"), tmp_path / "one")
    other = save(random_model(make_model("llama").config, 5), tmp_path / "other")
    facts = rank_facts

    def of_rank(files: Sequence[Path], *, config: str) -> dict[str, str]:
        if threading.current_thread() is threading.main_thread():
            return facts(files, config=config)
        return (
            facts(list(other.glob("*.safetensors")), config=config)
            if "weights" in fact
            else {**facts(files, config=config), fact: "1.2.3"}
        )

    monkeypatch.setattr(rank_runner, "rank_facts", of_rank)
    with (
        pytest.raises(ConfigError, match=f"rank 1 has another {fact} than rank 0"),
        llm_of_threads(folder, tensor_parallel_size=2),
    ):
        pass


@pytest.mark.slow
def test_a_worker_that_raises_hangs_or_dies_ends_the_call(tmp_path: Path) -> None:
    """Within 10 seconds, with the reason; no process is left, and a new `LLM` works."""
    folder = save(make_model("llama"), tmp_path)
    with two_ranks(folder) as llm, pytest.raises(WorkerError, match=r"rank 1 .*exit code 1.*ValueError: planted"):
        llm.collective_rpc(raise_on_rank_1)
    for stop, message in ((signal.SIGSTOP, "rank 1 did not answer within 8 s"), (signal.SIGKILL, "exit code -9")):
        with two_ranks(folder, distributed_timeout_seconds=8) as llm:
            (pid,) = processes_of(llm)
            assert_answers(llm, "llama")
            os.kill(pid, stop)
            with pytest.raises(WorkerError, match=message):
                llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY, use_tqdm=False)
            assert not is_there(pid)
    with two_ranks(folder) as llm:
        (pid,) = processes_of(llm)
        assert_answers(llm, "llama")
    assert not is_there(pid)
