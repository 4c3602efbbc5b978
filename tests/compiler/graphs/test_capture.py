"""Capture and replay: bitwise, over the caller's static inputs, never capturing late, freeing all.

The kind is `recorded` where there is no GPU; the tests marked `gpu` run the same on CUDA graphs.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import piecegraph as pg
from piecegraph.compiler.graphs.addresses import addresses_of, check_addresses
from piecegraph.errors import CaptureError, GraphNotCaptured, InputMismatch, UsageError
from piecegraph.progress import Phase
from tests.compiler.toy import DIMS, SPLIT_OPS, Decoder, batch

SIZES = (1, 2, 4, 8)
DESCRIPTORS = [pg.BatchDescriptor(num_tokens=size) for size in SIZES]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODES = [pg.CUDAGraphMode.FULL, pg.CUDAGraphMode.PIECEWISE]


def compiled_decoder(device: str = "cpu", compiler: str = "eager") -> pg.CompiledModel:
    config = pg.CompileConfig(split_ops=SPLIT_OPS, compiler=compiler, passes=(), compile_workers=0)
    examples = [tensor.to(device) for tensor in batch(9, 2)]
    return pg.compile(Decoder().to(device), config, dynamic_dims=DIMS, example_inputs=examples)


class StaticInputs:
    """The caller's buffers, one set per capture size."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.of: dict[pg.BatchDescriptor, list[torch.Tensor]] = {}

    def __call__(self, descriptor: pg.BatchDescriptor) -> Sequence[torch.Tensor]:
        inputs = [tensor.to(self.device) for tensor in batch(descriptor.num_tokens, 2)]
        self.of[descriptor] = inputs
        return inputs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_replay_is_bitwise_the_compiled_model(device: str, mode: pg.CUDAGraphMode, compiler: str) -> None:
    """L1 of the exactness ladder: the same pieces without graphs, at the same padded shape."""
    compiled = compiled_decoder(device, compiler)
    static = StaticInputs(device)
    with pg.capture(compiled, DESCRIPTORS, static, mode=mode) as graphs:
        assert graphs.kind == ("cuda" if device == "cuda" else "recorded")
        assert [d.num_tokens for d in graphs.descriptors] == [8, 4, 2, 1]  # largest first
        for seed in range(3):
            for descriptor in DESCRIPTORS:
                inputs = [tensor.to(device) for tensor in batch(descriptor.num_tokens, 2, seed)]
                expected = compiled(*inputs).clone()
                assert torch.equal(graphs.replay(descriptor, *inputs), expected)
                for target, value in zip(static.of[descriptor], inputs, strict=True):
                    assert torch.equal(target, value)  # filled the caller's own buffers
                    target.copy_(value)
                assert torch.equal(graphs.replay(descriptor), expected)
                out = torch.empty_like(expected)
                assert graphs.replay(descriptor, out=out) is out
                assert torch.equal(out, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_runs_over_the_static_inputs_in_place(mode: pg.CUDAGraphMode) -> None:
    compiled = compiled_decoder()
    static = StaticInputs()
    graphs = compiled.capture(DESCRIPTORS, static, mode=mode)
    first = graphs.replay(DESCRIPTORS[2]).clone()
    static.of[DESCRIPTORS[2]][0].add_(1).remainder_(32)
    second = graphs.replay(DESCRIPTORS[2])
    assert not torch.equal(first, second)
    assert torch.equal(second, compiled(*static.of[DESCRIPTORS[2]]))


def test_a_missing_graph_is_an_error_that_lists_the_captured_ones() -> None:
    graphs = compiled_decoder().capture(DESCRIPTORS, StaticInputs(), mode="FULL")
    with pytest.raises(
        GraphNotCaptured, match=r"no FULL graph for BatchDescriptor\(num_tokens=3\); captured .* \[1, 2, 4, 8\]"
    ):
        graphs.replay(pg.BatchDescriptor(num_tokens=3))
    with pytest.raises(GraphNotCaptured):
        graphs.replay(pg.BatchDescriptor(num_tokens=4, uniform_token_count=1))
    assert DESCRIPTORS[0] in graphs
    graphs.close()
    graphs.close()
    with pytest.raises(CaptureError, match="closed"):
        graphs.replay(DESCRIPTORS[0])


def test_inputs_that_do_not_fit_change_nothing() -> None:
    """Checked before anything is copied."""
    static = StaticInputs()
    graphs = compiled_decoder().capture(DESCRIPTORS, static, mode="PIECEWISE")
    descriptor = DESCRIPTORS[2]
    before = [tensor.clone() for tensor in static.of[descriptor]]
    ids, rows = batch(4, 2, seed=5)
    for args, message in [
        ((ids,), "captured with 2 inputs; replay was given 1"),
        ((ids, rows[:1]), r"input 1 of .* has shape \(1,\); the graph was captured for \(2,\)"),
        ((ids, rows.int()), "input 1 .* has dtype torch.int32"),
        ((ids, rows.to("meta")), "input 1 .* has device meta"),
        ((ids, 3), "input 1 .* is int; it was captured as a tensor"),
    ]:
        with pytest.raises(InputMismatch, match=message):
            graphs.replay(descriptor, *args)
    for tensor, kept in zip(static.of[descriptor], before, strict=True):
        assert torch.equal(tensor, kept)


def test_a_moved_parameter_is_named() -> None:
    """Rule 6: addresses of buffers and parameters, at every replay."""
    module = Decoder()
    config = pg.CompileConfig(split_ops=SPLIT_OPS, compiler="eager")
    compiled = pg.compile(module, config, dynamic_dims=DIMS, example_inputs=batch(4, 2))
    graphs = compiled.capture(DESCRIPTORS, StaticInputs(), mode="FULL")
    graphs.replay(DESCRIPTORS[0])
    module.head.weight.data = module.head.weight.data.clone()
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"head\.weight was given other memory"):
            graphs.replay(DESCRIPTORS[0])
    tensor = torch.zeros(4)
    places = addresses_of([("x", tensor)])
    check_addresses(places)


class Fails:
    """Raises at the k-th call of the split op, wherever that is in a capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compiled: pg.CompiledModel) -> None:
        self.calls, self.at = 0, -1
        namespace: Any = compiled.parts(batch(1, 2)).namespace
        op = namespace["op_pgtoy_attention"]

        def attention(*args: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                raise RuntimeError("injected")
            return op(*args)

        monkeypatch.setitem(namespace, "op_pgtoy_attention", attention)


@pytest.mark.slow
def test_failures_inside_a_capture_leave_that_bucket_without_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rule 8: raised at every op of the captures in turn; the rest is captured and serves, bitwise."""
    compiled = compiled_decoder()
    fails = Fails(monkeypatch, compiled)
    inputs = batch(4, 2, seed=3)
    expected = compiled(*inputs)
    compiled.capture(DESCRIPTORS, StaticInputs(), mode="PIECEWISE").close()
    total = fails.calls
    assert total == 3 * (3 + 2 * (len(DESCRIPTORS) - 1))  # 3 layers; 2 warm-ups, later one, and a capture; per size
    for at in range(1, total + 1):
        fails.calls, fails.at = 0, at
        with caplog.at_level(logging.WARNING):
            graphs = compiled.capture(DESCRIPTORS, StaticInputs(), mode="PIECEWISE")
        fails.at = -1
        (failed,) = graphs.failed
        assert len(graphs.descriptors) == len(DESCRIPTORS) - 1
        with pytest.raises(GraphNotCaptured, match=r"its capture failed \(RuntimeError: injected"):
            graphs.replay(failed.descriptor)
        if DESCRIPTORS[2] in graphs:
            assert torch.equal(graphs.replay(DESCRIPTORS[2], *inputs), expected)
        assert torch.equal(compiled(*inputs), expected)
        graphs.close()
    ours = [record for record in caplog.records if record.name.startswith("piecegraph")]
    assert len(ours) == total  # one warning each
    fails.calls, fails.at = 0, 20
    with pytest.raises(CaptureError, match=r"capturing BatchDescriptor\(num_tokens=2\) failed: RuntimeError: injected"):
        compiled.capture(DESCRIPTORS, StaticInputs(), mode="PIECEWISE", strict=True)


def test_context_surrounds_warm_up_and_capture() -> None:
    entered: list[tuple[int, str]] = []

    @contextmanager
    def context(descriptor: pg.BatchDescriptor, phase: str) -> Iterator[None]:
        entered.append((descriptor.num_tokens, phase))
        yield

    compiled_decoder().capture(DESCRIPTORS[:2], StaticInputs(), mode="FULL", context=context)
    assert entered == [(2, "warmup"), (2, "warmup"), (2, "capture"), (1, "warmup"), (1, "capture")]


def test_a_full_graph_holds_any_step() -> None:
    """FULL takes any callable: here sampling is part of the step."""
    compiled = compiled_decoder()

    def step(input_ids: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = compiled(input_ids, rows)
        return {"token": logits.argmax(-1), "best": logits.max(-1).values}

    graphs = pg.capture(step, DESCRIPTORS, StaticInputs(), mode="FULL")
    inputs = batch(4, 2, seed=9)
    result = graphs.replay(DESCRIPTORS[2], *inputs)
    assert torch.equal(result["token"], compiled(*inputs).argmax(-1))
    with pytest.raises(UsageError, match="PIECEWISE captures the pieces of a CompiledModel, and step is function"):
        pg.capture(step, DESCRIPTORS, StaticInputs(), mode="PIECEWISE")


def test_calls_that_cannot_mean_anything() -> None:
    compiled = compiled_decoder()
    for options, message in [
        ({"mode": "NONE"}, "capture takes mode FULL or PIECEWISE, not NONE"),
        ({"mode": "FULL_AND_PIECEWISE"}, "call it once for each"),
        ({"mode": "FULL", "check_interval": 0}, "check_interval=0"),
    ]:
        with pytest.raises(UsageError, match=message):
            pg.capture(compiled, DESCRIPTORS, StaticInputs(), **options)  # type: ignore[arg-type]  # by name
    with pytest.raises(UsageError, match="duplicates"):
        pg.capture(compiled, DESCRIPTORS * 2, StaticInputs(), mode="FULL")
    with pytest.raises(CaptureError, match="kind='cuda' needs static inputs on a CUDA device"):
        pg.capture(compiled, DESCRIPTORS, StaticInputs(), mode="FULL", kind="cuda")
    with pytest.raises(pg.errors.ConfigError, match=r"num_tokens is 0; a batch has at least 1"):
        pg.BatchDescriptor(num_tokens=0)


def test_capture_stops_before_the_budget() -> None:
    """Rule 9: the ledger tells bytes per graph, and capture ends before `max_bytes`, not after."""
    compiled = compiled_decoder()
    everything = compiled.capture(DESCRIPTORS, StaticInputs(), mode="PIECEWISE").ledger()
    assert all(everything.values())
    budget = everything[DESCRIPTORS[3]] + everything[DESCRIPTORS[2]]
    phases: list[Phase] = []
    graphs = compiled.capture(DESCRIPTORS, StaticInputs(), mode="PIECEWISE", max_bytes=budget, on_phase=phases.append)
    assert sum(graphs.ledger().values()) <= budget
    assert all("max_bytes" in failed.reason for failed in graphs.failed)
    assert phases[-1].seconds is not None


@pytest.mark.parametrize("cycles", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_many_cycles_leave_nothing_behind(cycles: int) -> None:
    compiled = compiled_decoder()

    def cycle() -> None:
        compiled.capture(DESCRIPTORS[:1], StaticInputs(), mode="PIECEWISE").close()

    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())

    cycle()
    before = live_tensors()
    for _ in range(cycles):
        cycle()
    assert live_tensors() <= before


@pytest.mark.gpu
def test_two_hundred_cycles_leave_gpu_memory_where_it_was() -> None:
    compiled = compiled_decoder("cuda")

    def cycle() -> int:
        compiled.capture(DESCRIPTORS, StaticInputs("cuda"), mode="PIECEWISE").close()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    first = [cycle() for _ in range(3)][-1]
    assert [cycle() for _ in range(200)][-1] <= first


@pytest.mark.gpu
def test_a_capture_that_waits_for_the_gpu_leaves_random_numbers_working(caplog: pytest.LogCaptureFixture) -> None:
    """It is invalid from there on; the bucket runs without graphs, and the process draws as before."""
    caplog.set_level(logging.ERROR)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + float(x.sum())

    x = torch.ones(4, device="cuda")
    with pg.capture(step, DESCRIPTORS[:1], lambda descriptor: [x], mode="FULL") as graphs:
        assert len(graphs.failed) == 1
    assert float(torch.rand(4, device="cuda").max()) <= 1
