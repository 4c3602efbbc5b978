from __future__ import annotations

from typing import Any

import pytest

from piecegraph.cache.store.entry import Entry
from piecegraph.cache.store.store import Store
from piecegraph.tools.cache.entries.entry_view import is_of_the_same, view
from tests.tools.cache.models import CPU, H200, NOW, save_kernels, save_model, save_piece


def test_a_plan(store: Store) -> None:
    model = save_model(store, "LlamaForCausalLM")
    said = view(model.plan)
    assert (said.kind, said.model, said.title) == ("plan", "LlamaForCausalLM", "LlamaForCausalLM 134.5M bfloat16")
    assert (said.num_pieces, said.num_unique_pieces, said.sizes) == (3, 1, (8,))
    assert (said.torch, said.arch, said.compile_seconds) == ("2.13.0", "x86_64 AVX2", 1.75)
    assert said.passes == {"select-rows-early": 1, "fuse-act-mul": 3}
    assert said.pieces == tuple(piece.key for piece in model.pieces)


def test_a_piece(store: Store) -> None:
    said = view(save_piece(store, "layer", size=4))
    assert (said.kind, said.title, said.sizes, said.kernels, said.nodes) == ("piece", None, (4,), 2, 9)


def test_kernels(store: Store) -> None:
    plan = save_model(store).plan.key
    said = view(save_kernels(store, plan, "add", "mul"))
    assert (said.kind, said.of, said.kernels, said.functions) == ("kernels", plan, 2, {"add": 1, "mul": 1})
    assert (said.arch, said.compile_seconds, said.title) == ("sm_90 NVIDIA H200", 4.0, None)


def test_what_differs_in_how_it_was_compiled_alone(store: Store) -> None:
    plan, other = (
        save_model(store, "First").plan.factors,
        save_model(store, "First", eps=0.5, machine=H200).plan.factors,
    )
    piece, later = save_piece(store, "a").factors, save_piece(store, "a", size=4).factors
    assert is_of_the_same(plan, other)
    assert not is_of_the_same(plan, save_model(store, "Second").plan.factors)
    assert is_of_the_same(piece, later)
    assert not is_of_the_same(piece, save_piece(store, "b").factors)
    kernels = [save_kernels(store, of, "add", machine=machine).factors for of, machine in (("1", CPU), ("1", H200))]
    assert is_of_the_same(*kernels)
    assert not is_of_the_same(kernels[0], save_kernels(store, "2", "add").factors)


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
    factors = dict.fromkeys(("kind", "machine"), value)
    notes = dict.fromkeys(
        ("model", "dtype", "num_parameters", "num_pieces", "sizes", "size", "passes", "pieces", "nodes"), value
    )
    said = view(Entry.of(factors, {}, created=NOW, notes=notes))
    assert said.torch is None
    assert said.pieces == ()
    assert said.kernels is None
