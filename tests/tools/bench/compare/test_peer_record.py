"""Tests of ours as a peer: the names and numbers that other peers' benches print, and their floors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from piecegraph.tools.bench.compare.peer_record import measure_as_peer
from piecegraph.tools.bench.compare.workload import PeerJob
from tests.runner.tiny_models import llama_config
from tests.tools.bench.assumed_ceilings import assume_ceilings

pytestmark = pytest.mark.usefixtures("models_are_traced_once")


def a_job(model: str, **options: object) -> PeerJob:
    return PeerJob(
        model=model,
        arguments={"compiler": "eager", "device": "cpu", "load_format": "dummy"},
        batch_sizes=(1, 2),
        prompt_tokens=8,
        decode_tokens=3,
        prefill=(2, 16),
        offline_tokens=(2, 8),
        **options,  # type: ignore[arg-type]  # values by name
    )


@pytest.mark.parametrize("offline_requests", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_it_has_the_peers_names(offline_requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assume_ceilings(monkeypatch)
    llama_config().save_pretrained(str(tmp_path))
    record = measure_as_peer(a_job(str(tmp_path), offline_requests=offline_requests))
    offline = {"offline_s", "offline_tok_s"} if offline_requests else set()
    times = {"import_s", "init_s", "first_token_s", "start_to_first_token_s"}
    figures = {"tpot_ms", "tpot_processor_ms", "prefill_tok_s", "peak_rss_bytes", "greedy_tokens"}
    assert set(record) == {"peer", "floors"} | figures | times | offline
    assert len(record["greedy_tokens"]) == 16 and record["peak_rss_bytes"] > 1 << 20
    assert set(record["floors"]) == {"tpot_ms", "prefill_tok_s"} | offline
    assert set(record["tpot_ms"]) == set(record["floors"]["tpot_ms"]) == {"1", "2"}
    assert all(record["floors"]["tpot_ms"][size] > 0 for size in ("1", "2"))
    assert record["floors"]["prefill_tok_s"] > record["prefill_tok_s"] > 0
    assert record["init_s"] + record["first_token_s"] < record["start_to_first_token_s"]


@pytest.mark.slow
def test_several_engines_are_measured_through_the_front_door(tmp_path: Path) -> None:
    """A batch is divided among them, in the floor too."""
    llama_config().save_pretrained(str(tmp_path))
    job = a_job(str(tmp_path), offline_requests=3)
    two = measure_as_peer(replace(job, arguments={**job.arguments, "data_parallel_size": 2, "max_num_seqs": 8}))
    assert all(two[name] > 0 for name in ("offline_tok_s", "prefill_tok_s")) and len(two["greedy_tokens"]) == 16
    of_steps = two["floors"]["tpot_ms"]
    assert of_steps["1"] == of_steps["2"] > 0, "one request on each engine takes what one takes"


def test_a_job_knows_its_longest_request_and_its_largest_batch() -> None:
    assert (a_job("m").longest, a_job("m").most_requests) == (32, 256)
    job = PeerJob(model="m", arguments={}, batch_sizes=(1,), offline_requests=0, prefill=(8, 100))
    assert (job.longest, job.most_requests) == (512 + 128 + 1, 8)
    assert PeerJob(model="m", arguments={}).longest == 2049
