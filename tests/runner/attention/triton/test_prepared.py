"""A layer's kernels get its own numbers and addresses, though equal layers share everything else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from piecegraph.passes.kernels.common.gpu_limits import H200
from piecegraph.runner.attention.interface.kv_cache import KVCache, KVScales
from piecegraph.runner.attention.interface.op_call import AttentionCall
from piecegraph.runner.attention.interface.rotary import Rotary
from piecegraph.runner.attention.triton.calls import LayerCall
from piecegraph.runner.attention.triton.kernels import launch
from piecegraph.runner.attention.triton.kernels.launch import CompiledForLaunch, KernelCall, KernelPreparer
from piecegraph.runner.attention.triton.launch_plan import launch_plan
from piecegraph.runner.attention.triton.metadata import TritonMetadata, allocate_workspace
from piecegraph.runner.attention.triton.prepared import CHANGES, _Kernels

ROWS, Q_HEADS, KV_HEADS, DIM = 8, 4, 2, 16
DEVICE = torch.device("cpu")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[KernelCall]:
    """Stand for compiling; the calls that were compiled."""
    calls: list[KernelCall] = []

    def compile_all(given: list[KernelCall]) -> list[CompiledForLaunch]:
        calls.extend(given)
        return [CompiledForLaunch(lambda *arguments: None, "not on a GPU") for _ in given]

    monkeypatch.setattr(launch, "_compile_all", compile_all)
    return calls


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def layer(**changes: Any) -> LayerCall:
    """Return a layer over tensors of its own; `changes` of its call, its rotary embedding, or its `scales`."""
    scales = changes.pop("scales", None)
    parts = {name: changes.pop(name) for name in list(changes) if name in {each.name for each in ROTARY_FIELDS}}
    rotary = Rotary(
        cos=empty(ROWS, DIM), sin=empty(ROWS, DIM), q_norm_weight=empty(DIM), k_norm_weight=empty(DIM), norm_eps=1e-6
    )
    call = AttentionCall(
        query=empty(ROWS, Q_HEADS, DIM),
        key=empty(ROWS, KV_HEADS, DIM),
        value=empty(ROWS, KV_HEADS, DIM),
        out=empty(ROWS, Q_HEADS, DIM),
        scale=0.25,
        layer=f"layer {id(rotary)}",
        rotary=dataclasses.replace(rotary, **parts),
    )
    cache = KVCache(empty(5, 16, KV_HEADS, DIM), empty(5, 16, KV_HEADS, DIM), scales)
    return LayerCall(call._replace(**changes), cache)


ROTARY_FIELDS = dataclasses.fields(Rotary)
WORKSPACE = allocate_workspace({layer().shape}, ROWS, H200, DEVICE)


def metadata(workspace: Any = WORKSPACE) -> TritonMetadata:
    lens, table = torch.ones(ROWS, dtype=torch.int32), torch.zeros(ROWS, 4, dtype=torch.int32)
    return TritonMetadata(
        num_reqs=2, num_tokens=ROWS, max_query_len=7, num_decode_reqs=1, query_start_loc=lens, seq_lens=lens,
        block_table=table, slot_mapping=torch.zeros(ROWS, dtype=torch.int64), host=None, gpu=H200,
        workspace=workspace, max_num_reqs=ROWS, max_len=64, block_table_stride=4, block_table_address=0,
        query_start_loc_address=0, seq_lens_address=0, slot_mapping_address=0, launch_key=(),
    )  # fmt: skip


def values(one: LayerCall, preparer: KernelPreparer, batch: TritonMetadata) -> dict[str, dict[str, Any]]:
    """Return what each kernel of a layer is launched with, but for what differs from batch to batch."""
    kernels = _Kernels(one, preparer, launch_plan(one.shape, ROWS, 64, H200), batch)
    found = {}
    for name, prepared in (
        ("decode", kernels.decode(0)),
        ("prefill", kernels.prefill(0)),
        ("kv_write", kernels.kv_write()),
    ):
        names = kernels._call(name, 0)[0].arguments
        found[name] = {
            each: value for each, value in zip(names, prepared._values, strict=True) if each not in CHANGES[name]
        }
    return found


def ones(shift: bool = False) -> KVScales:
    return KVScales(torch.ones(KV_HEADS), torch.ones(KV_HEADS), torch.ones(KV_HEADS, DIM) if shift else None)


OTHERS: dict[str, Any] = {
    "scale": {"scale": 0.5},
    "window": {"window": 7},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": empty(Q_HEADS)},
    "no rotary embedding": {"rotary": None},
    "norm_eps": {"norm_eps": 1e-5},
    "norm_offset": {"norm_offset": 1.0},
    "no norm": {"norm_eps": None, "q_norm_weight": None, "k_norm_weight": None},
    "one weight": {"q_norm_weight": None},
    "fewer rotated": {"cos": empty(ROWS, 8), "sin": empty(ROWS, 8)},
    "a slice of a merged projection": {"query": empty(ROWS, 8, DIM)[:, 2:6]},
    "another alignment": {"query": torch.empty(ROWS * Q_HEADS * DIM + 1, dtype=torch.bfloat16)[1:].view(ROWS, 4, DIM)},
    "scales": {"scales": ones()},
    "scales and shifts": {"scales": ones(shift=True)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_differs_gets_its_own_numbers(compiled: list[KernelCall], name: str) -> None:
    """Whatever was prepared before it, and so do layers after it that are like the first."""
    shared, batch = KernelPreparer(), metadata()
    for one in (layer(), layer(**OTHERS[name]), layer(), layer(**OTHERS[name])):
        assert values(one, shared, batch) == values(one, KernelPreparer(), batch)


def test_one_tensor_in_two_places_is_no_rule_for_other_layers(compiled: list[KernelCall]) -> None:
    shared, batch, table = KernelPreparer(), metadata(), empty(ROWS, DIM)
    for one in (
        layer(cos=table, sin=table),
        layer(),
        layer(q_norm_weight=(weight := empty(DIM)), k_norm_weight=weight),
    ):
        assert values(one, shared, batch) == values(one, KernelPreparer(), batch)


def test_equal_layers_are_prepared_once(compiled: list[KernelCall], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LayerCall] = []
    call_of = LayerCall.decode

    def decode(layer: LayerCall, *given: Any) -> KernelCall:
        made.append(layer)
        return call_of(layer, *given)

    monkeypatch.setattr(LayerCall, "decode", decode)
    shared, batch = KernelPreparer(), metadata()
    layers = [layer() for _ in range(3)]
    for one in layers:
        _Kernels(one, shared, launch_plan(one.shape, ROWS, 64, H200), batch).decode(0)
    assert made == layers[:1] and len(compiled) == 1


def test_another_workspace_is_taken(compiled: list[KernelCall]) -> None:
    """A second builder of metadata has one of its own."""
    shared, one = KernelPreparer(), layer()
    other = allocate_workspace({one.shape}, ROWS, H200, DEVICE)
    addresses = [values(one, shared, metadata(each))["decode"]["partial_out"] for each in (WORKSPACE, other)]
    assert addresses == [WORKSPACE.out.data_ptr(), other.out.data_ptr()]
