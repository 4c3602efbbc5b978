"""The workload of all peers: who is timed for what, and transformers as one of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from piecegraph.tools.bench.compare import llama_cpp_peer, transformers_peer
from piecegraph.tools.bench.compare.compare import PeerRun, agreements
from piecegraph.tools.bench.compare.workload import PeerJob, Prompts, decode_ms, job_of, prefill_rate
from piecegraph.tools.bench.measure.offline_workload import LARGEST_TOKEN_ID
from tests.runner.tiny_models import make_model, save

JOB = PeerJob(model="m", batch_sizes=(1, 2), prompt_tokens=4, decode_tokens=5, prefill=(2, 8), offline_requests=0)


class Clock:
    """A program whose steps take a second each by the clock, and half of that of the processor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "process_time", lambda: self.now / 2)

    def generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
        self.now += 10 + num_tokens
        return [[0] * num_tokens for _ in prompts]


def test_a_decode_step_is_what_a_long_answer_takes_more_than_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode_ms(Clock(monkeypatch).generate, Prompts(64), 2, JOB) == (1000.0, 500.0)


def test_a_prefill_is_all_tokens_over_the_time_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prefill_rate(Clock(monkeypatch).generate, Prompts(64), 2, 8) == 16 / 11


def test_all_programs_have_the_same_prompts() -> None:
    assert Prompts(64).make(2, 5) == Prompts(64).make(2, 5)
    assert max(token for prompt in Prompts(10**6).make(50, 50) for token in prompt) <= LARGEST_TOKEN_ID


def test_tokens_that_agree_are_counted_to_the_first_that_differs() -> None:
    def run(name: str, tokens: object) -> PeerRun:
        return PeerRun(name=name, record={"greedy_tokens": tokens}, reason=None, seconds=1.0)

    (found, all_same) = agreements(
        [run("piecegraph", [1, 2, 3, 4]), run("a", [1, 2, 9, 4]), run("b", [1, 2, 3, 4]), run("c", None)]
    )
    assert found.as_line() == "a: the first 2 of 4 greedy tokens of a prompt are piecegraph's"
    assert (all_same.name, all_same.same) == ("b", 4)
    assert agreements([run("a", [1])]) == []


def test_transformers_is_a_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its record has every name of the workload, and its tokens are those of one whole forward for each token."""
    import torch

    model = make_model("llama")
    job = {**asdict(JOB), "model": save(model, tmp_path).as_posix()}
    assert transformers_peer.main([json.dumps(job), "float32"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record["tpot_ms"]) == set(record["tpot_processor_ms"]) == {"1", "2"}
    assert record["prefill_tok_s"] > 0 and record["peer"] == "transformers"
    generate, vocab_size = transformers_peer.generator(job_of(json.dumps(job)), "float32", compiles=False)
    prompts = Prompts(vocab_size).make(2, 6)
    tokens = torch.tensor(prompts)
    for _ in range(3):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    assert generate(prompts, 3) == tokens[:, 6:].tolist()


def test_a_missing_llama_cpp_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(SystemExit, match=r"llama-cpp-python is missing .*`make peers` builds it"):
        llama_cpp_peer.main([json.dumps(asdict(JOB)), "1"])
