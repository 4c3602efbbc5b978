"""Tests of the bench of the host's time: the steps it runs, and that a step without a new block sends nothing."""

from __future__ import annotations

from typing import NoReturn

import pytest

from piecegraph.runner.device_memory import staged_write
from piecegraph.runner.sampling.options import staged_rows
from piecegraph.runner.scheduling.scheduler_output import ScheduledDecodes, SchedulerOutput
from piecegraph.runner.step.state import input_buffers
from piecegraph.tools.bench.host_step import TOKEN, decoding_engine, measure_host_step

pytestmark = pytest.mark.usefixtures("models_are_traced_once")


def test_it_measures_every_part_of_decode_steps() -> None:
    found = measure_host_step(4, 12, block_size=4)
    assert (found.num_reqs, found.steps) == (4, 12)
    assert set(found.median_ms) == {
        "schedule",
        "execute_model",
        "sample_tokens",
        "output_wait",
        "processing",
        "total",
    }
    assert all(found.p10_ms[name] <= found.median_ms[name] <= found.p90_ms[name] for name in found.median_ms)
    assert found.median_ms["total"] > 0


def test_a_step_in_which_nobody_needs_a_block_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step copies nothing to the device and launches no kernel but the replay's."""
    engine, runner = decoding_engine(3, num_steps=40, block_size=32)
    outputs: list[SchedulerOutput] = []
    execute = runner.execute_model

    def seen(output: SchedulerOutput) -> None:
        outputs.append(output)
        with monkeypatch.context() as patch:
            if not output.new_blocks:
                for module in (input_buffers, staged_rows):
                    patch.setattr(module, "to_device", refuse)
                for name in ("pack_writes", "pack_cells"):
                    patch.setattr(staged_write, name, refuse)
            execute(output)

    monkeypatch.setattr(runner, "execute_model", seen)
    for _ in range(40):
        engine.step()
    assert all(isinstance(output.scheduled, ScheduledDecodes) for output in outputs)
    with_blocks = [output for output in outputs if output.new_blocks]
    assert 3 <= sum(len(output.new_blocks) for output in with_blocks) <= 6
    assert all(len(request.output_token_ids) >= 40 for request in engine.requests.values())
    assert {token for request in engine.requests.values() for token in request.output_token_ids} == {TOKEN}


def refuse(*_: object) -> NoReturn:
    raise AssertionError("a decode step without new blocks sends something to the device")
