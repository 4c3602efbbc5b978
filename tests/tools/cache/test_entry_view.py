from __future__ import annotations

from typing import Any

import pytest

from piecegraph.cache.entry import Entry
from piecegraph.cache.store import Store
from piecegraph.tools.cache.entry_view import view
from tests.tools.cache.models import CPU, H200, NOW, save_model, save_piece


def test_a_plan(store: Store) -> None:
    model = save_model(store, "LlamaForCausalLM")
    said = view(model.plan)
    assert (said.kind, said.model, said.title) == ("plan", "LlamaForCausalLM", "LlamaForCausalLM 134.5M bfloat16")
    assert (said.num_pieces, said.num_unique_pieces, said.sizes) == (3, 1, (8,))
    assert (said.torch, said.arch, said.compile_seconds) == ("2.13.0", "x86_64 AVX2", 1.75)
    assert said.passes == {"tail": 1, "fuse-act-mul": 3}
    assert said.pieces == tuple(piece.key for piece in model.pieces)


def test_a_piece(store: Store) -> None:
    said = view(save_piece(store, "layer", size=4))
    assert (said.kind, said.title, said.sizes, said.kernels, said.nodes) == ("piece", None, (4,), 2, 9)
    assert view(save_piece(store, "layer")).symbols == {"s0": [1, 2048]}


@pytest.mark.parametrize(
    ("machine", "arch"),
    [
        (H200, "sm_90 NVIDIA H200"),
        ({"gpu": {"name": "other", "capability": 9}}, "other"),
        (CPU, "x86_64 AVX2"),
        ({"cpu": {"isa": 512}}, None),
        ({"device": "tpu"}, None),
        ("a string", None),
    ],
)
def test_architectures(machine: Any, arch: str | None) -> None:
    entry = Entry.of({"machine": machine}, {}, created=NOW)
    assert view(entry).arch == arch


@pytest.mark.parametrize("value", [None, 3, "text", ["list"], {"a": {"b": 1}}, True, 1.5])
def test_what_another_version_wrote_is_taken_as_far_as_it_goes(value: Any) -> None:
    """Whatever type a field has, the rest is shown."""
    factors = dict.fromkeys(("kind", "machine", "symbols"), value)
    notes = dict.fromkeys(
        ("model", "dtype", "num_parameters", "num_pieces", "sizes", "size", "passes", "pieces", "nodes"), value
    )
    said = view(Entry.of(factors, {}, created=NOW, notes=notes))
    assert said.torch is None
    assert said.pieces == ()
    assert said.kernels is None
