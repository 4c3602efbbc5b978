from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from piecegraph.cache.store.store import Store
from tests.tools.cache.models import (
    H200,
    NOW,
    CacheCommand,
    Model,
    save_kernels,
    save_model,
    save_piece,
)


@pytest.fixture
def models(store: Store, monkeypatch: pytest.MonkeyPatch) -> tuple[Model, Model]:
    """Two models, the second a day younger and twice loaded, and a piece of neither."""
    store.clock = lambda: NOW
    small = save_model(store, "SmallModel")
    store.clock = lambda: NOW + 86400
    large = save_model(store, "LargeModel", eps=1e-5, layers=40, machine=H200)
    for _ in range(2):
        store.load(large.plan.key)
    store.clock = lambda: NOW - 86400
    save_piece(store, "alone")
    monkeypatch.setattr("time.time", lambda: NOW + 2 * 86400)
    return small, large


def test_a_row_a_model_last_used_first(models: tuple[Model, Model], cache: CacheCommand) -> None:
    """The pieces of a model are in its row; entries that belong to no model have a row of their own."""
    header, large, small, piece = cache("ls").splitlines()
    assert header.split("  ")[0] == "KEY"
    assert large.startswith(models[1].plan.key[:12] + "  LargeModel 134.5M bfloat16  sm_90 NVIDIA H200  2.13.0")
    assert " 40/1  8 " in large
    assert "24.0 h ago     2  complete" in large
    assert small.startswith(models[0].plan.key[:12] + "  SmallModel")
    assert piece.split()[1] == "piece"
    assert cache.err == ""


def test_json_has_exact_values(models: tuple[Model, Model], cache: CacheCommand, store: Store) -> None:
    plan, pieces = models[1].plan, models[1].pieces
    rows = cache.json("ls")
    assert [row["models"] for row in rows] == [
        ["LargeModel 134.5M bfloat16"],
        ["SmallModel 134.5M bfloat16"],
        [],
    ]
    file = store.layout.entry(plan.key).stat().st_size
    blobs = {ref.digest: ref.size for entry in (plan, *pieces) for ref in entry.blobs.values()}
    files = sum(store.layout.entry(entry.key).stat().st_size for entry in (plan, *pieces))
    assert rows[0] == {
        "key": plan.key,
        "kind": "plan",
        "models": ["LargeModel 134.5M bfloat16"],
        "arch": "sm_90 NVIDIA H200",
        "torch": "2.13.0",
        "num_pieces": 40,
        "num_unique_pieces": 1,
        "sizes": [8],
        "compile_seconds": 1.75,
        "bytes": file + sum(ref.size for ref in plan.blobs.values()),
        "bytes_with_pieces": files + sum(blobs.values()),
        "created": NOW + 86400,
        "last_used": NOW + 86400,
        "hits": 2,
        "state": "complete",
        "detail": "",
        "is_loadable": True,
    }


def test_pieces_on_request(models: tuple[Model, Model], cache: CacheCommand) -> None:
    rows = cache.json("ls", "--pieces")
    assert len(rows) == 7
    (row,) = (row for row in rows if row["key"] == models[0].pieces[1].key)
    assert (row["kind"], row["models"], row["sizes"]) == ("piece", ["SmallModel 134.5M bfloat16"], [8])
    assert "piece of SmallModel 134.5M bfloat16" in cache("ls", "--pieces")


def test_kernels_are_a_part_of_their_model(models: tuple[Model, Model], store: Store, cache: CacheCommand) -> None:
    """Kernels that are for no plan have a row of their own."""
    save_kernels(store, models[0].plan.key, "add")
    alone = save_kernels(store, "0" * 64, "add")
    assert len(cache.json("ls", "--pieces")) == 9
    (row,) = (row for row in cache.json("ls") if row["kind"] == "kernels")
    assert (row["key"], row["models"], row["arch"]) == (alone.key, [], "sm_90 NVIDIA H200")
    assert "kernels of SmallModel 134.5M bfloat16" in cache("ls", "--pieces")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--model", "small"), ["SmallModel"]),
        (("--arch", "h200"), ["LargeModel"]),
        (("--torch", "2.13"), ["LargeModel", "SmallModel", None]),
        (("--torch", "2.11"), []),
        (("--state", "complete", "--model", "model"), ["LargeModel", "SmallModel"]),
        (("--state", "corrupt"), []),
        (("--unused-for", "36h"), ["SmallModel", None]),
        (("--sort", "model"), [None, "LargeModel", "SmallModel"]),
        (("--sort", "model", "--reverse"), ["SmallModel", "LargeModel", None]),
        (("--sort", "size"), ["LargeModel", "SmallModel", None]),
        (("--sort", "hits"), ["LargeModel", "SmallModel", None]),
        (("--sort", "seconds"), [None, "LargeModel", "SmallModel"]),
        (("--sort", "created", "--reverse"), [None, "SmallModel", "LargeModel"]),
    ],
)
def test_filters_and_orders(
    models: tuple[Model, Model], cache: CacheCommand, options: tuple[str, ...], found: list[str | None]
) -> None:
    rows = cache.json("ls", *options)
    assert [row["models"][0].split()[0] if row["models"] else None for row in rows] == found
    if not found:
        assert "none of the 7 entries is like that" in cache.err


def test_a_shared_piece_names_all_its_models(store: Store, cache: CacheCommand) -> None:
    save_model(store, "First")
    save_model(store, "Second", layers=5)
    pieces = [row for row in cache.json("ls", "--pieces") if row["kind"] == "piece"]
    assert [sorted(row["models"]) for row in pieces] == [["First 134.5M bfloat16", "Second 134.5M bfloat16"]] * 2


def test_a_plan_without_its_pieces_is_not_complete(store: Store, cache: CacheCommand) -> None:
    model = save_model(store)
    store.delete(model.pieces[1].key)
    (row,) = cache.json("ls")
    assert (row["state"], row["detail"], row["is_loadable"]) == ("pieces missing", "1 of 2 cannot be loaded", False)


def rewrite(store: Store, key: str, changed: dict[str, Any], *, sign: bool) -> None:
    """Change fields of an entry on the disk, signed again or not."""
    path = store.layout.entry(key)
    file = json.loads(path.read_bytes())
    file["entry"].update(changed)
    body = json.dumps(file["entry"], sort_keys=True, separators=(",", ":")).encode()
    if sign:
        file["signature"] = store.signer.sign("entry", body)
    path.write_text(json.dumps(file, sort_keys=True, separators=(",", ":")))


def test_a_corrupt_file_is_a_row(store: Store, cache: CacheCommand) -> None:
    key = save_piece(store, "one").key
    store.layout.entry(key).write_bytes(b"\x00 no entry")
    (row,) = cache.json("ls")
    assert (row["key"], row["kind"], row["state"], row["is_loadable"]) == (key, None, "corrupt", False)
    assert row["detail"].startswith("no canonical JSON")
    assert cache("ls").splitlines()[1].startswith(f"{key[:12]}  -")


def test_an_entry_of_another_version_is_shown_as_far_as_it_goes(store: Store, cache: CacheCommand) -> None:
    key = save_piece(store, "one").key
    rewrite(store, key, {"format": 99, "new": {"field": 1}, "notes": {"pieces": 7, "model": ["other"]}}, sign=True)
    (row,) = cache.json("ls")
    assert (row["kind"], row["state"], row["torch"]) == ("piece", "other version", "2.13.0")
    assert row["detail"] == "format 99; this version reads 1"
    assert cache("ls").splitlines()[1].endswith("other version")


def test_untrusted_entries_are_shown_and_cannot_steer_the_terminal(store: Store, cache: CacheCommand) -> None:
    key = save_model(store).plan.key
    rewrite(store, key, {"notes": {"model": "\x1b[2Jevil\nrow"}}, sign=False)
    (line,) = (line for line in cache("ls").splitlines() if line.startswith(key[:12]))
    assert "\\x1b[2Jevil\\nrow" in line
    assert line.endswith("forged")


def test_no_cache_and_an_empty_one_are_no_errors(cache: CacheCommand, cache_dir: Path) -> None:
    assert cache.json("ls") == []
    assert cache.err == f"there is no cache at {cache_dir} yet\n"
    assert not cache_dir.exists()
    cache_dir.mkdir(mode=0o700)
    assert cache("ls") == ""
    assert cache.err == f"the cache at {cache_dir} has no entries\n"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> list[str]:
    """The names of all files below the cache that are opened."""
    names: list[str] = []
    real = os.open

    def counted(path: Any, *args: Any, **options: Any) -> int:
        if str(path).startswith(str(cache_dir)):
            names.append(Path(path).name)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", counted)
    return names


def test_a_listing_reads_each_entry_once_and_no_blob(store: Store, cache: CacheCommand, opened: list[str]) -> None:
    """The test counts reads, which make a listing slow; seconds are for benchmarks."""
    keys = {save_piece(store, f"piece {index}").key for index in range(30)}
    opened.clear()
    assert len(cache.json("ls")) == 30
    assert sorted(opened) == sorted([*(f"{key}.json" for key in keys), "counters.log"])
