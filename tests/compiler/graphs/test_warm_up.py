"""The warm-up of every bucket but the first runs each kind of step once: every kernel, at a cost without depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import piecegraph as pg
from piecegraph.compiler.graphs.warm_up import call_each_kind
from piecegraph.errors import UsageError
from tests.compiler.graphs.replay.test_patched_ops import Scaled
from tests.compiler.graphs.replay.test_prepared_ops import OP
from tests.compiler.graphs.test_capture import DESCRIPTORS, DEVICES, MODES, StaticInputs
from tests.compiler.toy import DIMS, SPLIT_OPS, Decoder, batch

FULL, PIECEWISE = MODES
Work = dict[tuple[int, str], Counter[str]]
"""By number of tokens and phase: operations, and layers that attended."""


def compiled_decoder(num_layers: int, device: str = "cpu") -> pg.CompiledModel:
    config = pg.CompileConfig(split_ops=SPLIT_OPS, compiler="eager", passes=())
    examples = [tensor.to(device) for tensor in batch(9, 2)]
    return pg.compile(Decoder(num_layers).to(device), config, dynamic_dims=DIMS, example_inputs=examples)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        layer = args[-1] if str(func).startswith(OP.replace("::", ".")) else None
        self.count[str(func) if layer is None else str(layer)] += 1
        return func(*args, **(kwargs or {}))


class Attention:
    """What a runner registers. `kind_of_layer`: what differs with a layer's name."""

    def __init__(self, kind_of_layer: Callable[[str], object] = lambda layer: None) -> None:
        self.kind_of_layer = kind_of_layer
        self.count: Counter[str] = Counter()  # of launches, by layer
        self.is_finite = True

    def prepare(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, layer: str
    ) -> Callable[[None], None]:
        def launch(metadata: None) -> None:
            self.count[layer] += 1
            if query.device.type == "cpu":  # a recording may not wait for a GPU
                self.is_finite &= all(bool(tensor.isfinite().all()) for tensor in (query, key, value))
            out.copy_(torch.softmax(query @ key.T, dim=-1) @ value)

        return launch

    def metadata(self) -> None:
        return None

    def kind(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, layer: str) -> Any:
        return query, key, value, out, self.kind_of_layer(layer)


def work_of(compiled: pg.CompiledModel, mode: pg.CUDAGraphMode, attention: Attention, **options: Any) -> Work:
    """What a capture of `DESCRIPTORS` runs."""
    work: Work = {}

    @contextmanager
    def context(descriptor: pg.BatchDescriptor, phase: str) -> Iterator[None]:
        attention.count.clear()
        with Operations() as operations:
            yield
        found = work.setdefault((descriptor.num_tokens, phase), Counter())
        found.update(operations.count)
        found.update(attention.count)

    compiled.capture(DESCRIPTORS, StaticInputs(), mode=mode, context=context, **options).close()
    return work


def layers(count: Counter[str]) -> dict[str, int]:
    return {name: number for name, number in count.items() if name.startswith("layer.")}


@pytest.mark.parametrize("mode", MODES)
def test_a_warm_up_costs_the_same_at_any_depth(mode: pg.CUDAGraphMode) -> None:
    """The first warm-up runs everything once, and each kind again. Later ones run all kernels of the recording."""
    attention = Attention()
    with pg.register_prepare(OP, attention.prepare, attention.metadata, attention.kind):
        shallow, deep = (work_of(compiled_decoder(depth), mode, attention) for depth in (3, 8))
    for size in (4, 2, 1):
        assert shallow[size, "warmup"] == deep[size, "warmup"]
        assert layers(deep[size, "warmup"]) == {"layer.0": 1}
        assert set(deep[size, "warmup"]) | set(layers(deep[size, "capture"])) == set(deep[size, "capture"])
    assert layers(deep[8, "warmup"]) == {f"layer.{layer}": 1 + (layer == 0) for layer in range(8)}
    assert all(layers(deep[size, "capture"]) == {f"layer.{layer}": 1 for layer in range(8)} for size in (8, 4, 2, 1))
    assert attention.is_finite


@pytest.mark.parametrize("mode", MODES)
def test_layers_of_two_kinds_both_run(mode: pg.CUDAGraphMode) -> None:
    attention = Attention(lambda layer: int(layer.partition(".")[2]) % 3 == 2)
    with pg.register_prepare(OP, attention.prepare, attention.metadata, attention.kind):
        work = work_of(compiled_decoder(7), mode, attention)
    assert layers(work[4, "warmup"]) == {"layer.0": 1, "layer.2": 1}


@pytest.mark.parametrize("mode", MODES)
def test_a_split_op_of_unknown_kind_always_runs(mode: pg.CUDAGraphMode) -> None:
    """It receives the outputs of pieces that ran."""
    attention = Attention()
    with pg.register_prepare(OP, attention.prepare, attention.metadata):
        work = work_of(compiled_decoder(5), mode, attention)
    assert layers(work[4, "warmup"]) == {f"layer.{layer}": 1 for layer in range(5)}
    assert work[4, "warmup"].total() < work[4, "capture"].total()
    assert attention.is_finite


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_replays_are_bitwise_the_compiled_model(mode: pg.CUDAGraphMode, device: str) -> None:
    compiled, attention = compiled_decoder(5, device), Attention()
    with pg.register_prepare(OP, attention.prepare, attention.metadata, attention.kind):
        graphs = compiled.capture(DESCRIPTORS, StaticInputs(device), mode=mode)
    for seed in range(2):
        for descriptor in DESCRIPTORS:
            inputs = [tensor.to(device) for tensor in batch(descriptor.num_tokens, 2, seed)]
            assert torch.equal(graphs.replay(descriptor, *inputs), compiled(*inputs))


def test_steps_that_did_not_run_are_patched_too() -> None:
    """The bucket is still one graph."""
    attention = Scaled()

    def kind(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, layer: str) -> Any:
        return query, key, value, out

    with pg.register_prepare(OP, attention.prepare, attention.metadata, kind):
        graphs = compiled_decoder(4).capture(DESCRIPTORS, StaticInputs(), mode=PIECEWISE)
    assert [graphs.costs(descriptor) for descriptor in DESCRIPTORS] == [{"graph": 1, "patch": 4}] * len(DESCRIPTORS)


def test_a_full_step_may_bring_its_own_warm_up() -> None:
    """The code around the model runs as well, over a result of the right shape."""
    compiled, attention = compiled_decoder(4), Attention()
    shapes: list[tuple[int, ...]] = []

    def step_over(model: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def step(input_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            logits = model(input_ids, rows)
            shapes.append(tuple(logits.shape))
            return logits.argmax(-1)

        return step

    ran: list[int] = []

    def warmed_up(input_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ran.append(input_ids.shape[0])
        return call_each_kind(compiled, input_ids, rows)

    with pg.register_prepare(OP, attention.prepare, attention.metadata, attention.kind):
        graphs = pg.capture(step_over(compiled), DESCRIPTORS, StaticInputs(), mode=FULL, warm_up=step_over(warmed_up))
    assert ran == [8, 4, 2, 1]
    assert shapes == [(2, 32)] * (3 + 2 * 3)
    inputs = batch(4, 2, seed=9)
    assert torch.equal(graphs.replay(DESCRIPTORS[2], *inputs), compiled(*inputs).argmax(-1))
    with pytest.raises(UsageError, match="warm_up is for FULL"):
        compiled.capture(DESCRIPTORS, StaticInputs(), mode=PIECEWISE, warm_up=compiled)
