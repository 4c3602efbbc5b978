from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph.cache.store.store import Store
from piecegraph.errors import CacheError
from piecegraph.tools.cache.reading.filled import read_filled, table_lines, target_lines
from tests.tools.cache.models import BUILD, CPU, H200, save_model


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "cache", key_file=tmp_path / "own.key")


def test_a_plan_and_the_pieces_it_is_made_of(store: Store) -> None:
    model = save_model(store)
    filled = read_filled(store, model.plan.key)
    assert filled.title == "tiny 134.5M bfloat16"
    assert [(row.name, row.size, row.shared_by, row.seconds) for row in filled.rows] == [
        ("plan", None, None, 1.75),
        ("piece_0", None, 3, 2.5),
        ("piece_0_size_8", 8, 3, 2.5),
    ]
    assert [row.key for row in filled.rows] == [model.plan.key, *(piece.key for piece in model.pieces)]
    assert filled.rows[0].bytes == sum(ref.size for ref in model.plan.blobs.values())
    blobs = {ref for entry in (model.plan, *model.pieces) for ref in entry.blobs.values()}
    assert filled.bytes == sum(ref.size for ref in blobs) < sum(row.bytes for row in filled.rows)  # the twins share


@pytest.mark.parametrize("is_plan", [True, False])
def test_what_cannot_be_read_again_is_an_error(store: Store, is_plan: bool) -> None:
    model = save_model(store)
    store.delete(model.plan.key if is_plan else model.pieces[1].key)
    what = "plan" if is_plan else "piece_0_size_8"
    with pytest.raises(CacheError, match=rf"{what} was stored .* cannot be read again \(absent\)"):
        read_filled(store, model.plan.key)


def test_the_table(store: Store) -> None:
    lines = table_lines(read_filled(store, save_model(store).plan.key).rows)
    assert [line.split()[:4] for line in lines] == [
        ["entry", "size", "pieces", "seconds"],
        ["plan", "1.8", *lines[1].split()[2:4]],
        ["piece_0", "any", "3", "2.5"],
        ["piece_0_size_8", "8", "3", "2.5"],
    ]


def factors(machine: object, threads: int) -> dict[str, object]:
    build = {**BUILD, "torch": {"version": "2.13.0", "git": "a1b2"}, "transformers": "5.17.0", "python": "CPython 3.11"}
    return {"machine": machine, "build": build, "settings": {"num_threads": threads}}


def test_the_machine_versions_and_threads_are_told() -> None:
    assert list(target_lines(factors(CPU, 1))) == [
        "cpu, x86_64 AVX2 (flags ffffffffffffffff)",
        "torch 2.13.0, triton 3.9.0, transformers 5.17.0, CPython 3.11; 1 thread",
    ]
    assert list(target_lines(factors(H200, 8))) == [
        "cuda:0, NVIDIA H200 (compute capability 9.0), driver 580.1, CUDA 13.0; host code for x86_64 AVX2",
        "torch 2.13.0, triton 3.9.0, transformers 5.17.0, CPython 3.11; 8 threads",
    ]
