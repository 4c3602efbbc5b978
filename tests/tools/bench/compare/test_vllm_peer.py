"""vLLM as a peer: what it is asked for, by a module in its place that keeps what it is given."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from piecegraph.tools.bench.compare import vllm_peer
from piecegraph.tools.bench.compare.workload import PeerJob

JOB = PeerJob(
    model="folder",
    batch_sizes=(1, 2),
    prompt_tokens=4,
    decode_tokens=5,
    prefill=(2, 8),
    offline_requests=3,
    offline_tokens=(2, 4),
)


def outputs(params: Any) -> SimpleNamespace:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(params["max_tokens"]))])


class FakeVllm:
    """The modules that the peer imports, as far as it uses them; it keeps arguments and requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = self
        self.arguments: dict[str, Any] = {}
        self.params: list[dict[str, Any]] = []
        self.closed = 0
        self.environment: dict[str, str] = {}
        self.request_ids: list[str] = []
        model_config = SimpleNamespace(get_vocab_size=lambda: 64)

        def close() -> None:
            self.closed += 1

        class LLM:
            def __init__(self, **arguments: Any) -> None:
                fake.arguments, fake.environment = arguments, dict(os.environ)
                self.model_config = model_config
                self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=close))

            def generate(self, prompts: Sequence[Any], params: Sequence[Any], use_tqdm: bool) -> list[SimpleNamespace]:
                assert len(prompts) == len(params) and all(prompt["prompt_token_ids"] for prompt in prompts)
                fake.params.extend(params)
                return [outputs(each) for each in params]

        class AsyncLLM:
            def __init__(self) -> None:
                self.model_config, self.shutdown = model_config, close

            @classmethod
            def from_engine_args(cls, arguments: dict[str, Any]) -> AsyncLLM:
                fake.arguments, fake.environment = arguments, dict(os.environ)
                return cls()

            async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
                fake.params.append(params)
                fake.request_ids.append(request_id)
                yield outputs(params)

        modules: dict[str, dict[str, Any]] = {
            "vllm": {"LLM": LLM},
            "vllm.sampling_params": {
                "SamplingParams": dict,
                "RequestOutputKind": SimpleNamespace(FINAL_ONLY="final only"),
            },
            "vllm.engine.arg_utils": {"AsyncEngineArgs": dict},
            "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        }
        for name, content in modules.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        for name in vllm_peer.variables(2, 1):
            monkeypatch.setenv(name, "")  # so that it is restored
            monkeypatch.delenv(name)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return FakeVllm(monkeypatch)


def record_of(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert vllm_peer.main([json.dumps(asdict(JOB)), *options]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def test_a_record_has_every_figure_of_the_workload(fake: FakeVllm, capsys: pytest.CaptureFixture[str]) -> None:
    record = record_of(capsys)
    assert record["peer"] == "vllm" and set(record["tpot_ms"]) == {"1", "2"}
    assert {"import_s", "init_s", "start_to_first_token_s", "prefill_tok_s", "offline_tok_s"} <= set(record)
    assert record["greedy_tokens"] == list(range(16)) and fake.closed == 1


def test_answers_have_the_lengths_of_the_workload(fake: FakeVllm, capsys: pytest.CaptureFixture[str]) -> None:
    """The last requests are the offline ones, sampled; all others are greedy, and none ends early."""
    record_of(capsys)
    assert {each["temperature"] for each in fake.params[:-3]} == {0.0}
    assert {each["temperature"] for each in fake.params[-3:]} == {0.6}
    assert all(2 <= each["max_tokens"] <= 4 for each in fake.params[-3:])
    assert all(each["ignore_eos"] and each["output_kind"] == "final only" for each in fake.params)


def test_options_are_arguments_of_vllm(fake: FakeVllm, capsys: pytest.CaptureFixture[str]) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}
    record_of(
        capsys,
        *("--tensor-parallel-size", "2", "--enable-expert-parallel", "--quantization", "fp8"),
        *("--kv-cache-dtype", "fp8", "--speculative", json.dumps(drafts), "--load-format", "dummy"),
        *("--max-model-len", "99", "--hf-overrides", '{"a": 1}'),
    )
    given = {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "speculative_config": drafts,
        "load_format": "dummy",
        "max_model_len": 99,
        "hf_overrides": {"a": 1},
        "enable_prefix_caching": False,
        "max_num_seqs": JOB.most_requests,
    }
    assert {name: fake.arguments[name] for name in given} == given
    assert "data_parallel_size" not in fake.arguments  # `LLM` refuses more than one, and needs no other


def test_several_engines_are_asked_at_once(fake: FakeVllm, capsys: pytest.CaptureFixture[str]) -> None:
    """Each request has an id of its own, and the engines are in processes."""
    record = record_of(capsys, "--data-parallel-size", "2")
    assert fake.arguments["data_parallel_size"] == 2 and fake.closed == 1
    assert len(set(fake.request_ids)) == len(fake.request_ids) == len(fake.params)
    assert record["greedy_tokens"] == list(range(16)) and record["offline_tok_s"] > 0
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in fake.environment


def test_an_engine_whose_run_fails_is_closed(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(engine: object, job: PeerJob) -> dict[str, float]:
        raise ZeroDivisionError

    monkeypatch.setattr(vllm_peer, "offline", fail)
    with pytest.raises(ZeroDivisionError):
        record_of(capsys)
    assert fake.closed == 1


def test_what_is_set_in_the_environment_stays(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One GPU leaves variables of sums alone; several need no multicast."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    record_of(capsys)
    assert fake.environment["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    assert fake.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_USE_NCCL_SYMM_MEM" not in fake.environment
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    assert vllm_peer.variables(2, 1)["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"


def test_a_missing_vllm_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit, match=r"vllm is missing .*name a Python that has it: --peer 'vllm=PYTHON -m"):
        vllm_peer.import_it()
