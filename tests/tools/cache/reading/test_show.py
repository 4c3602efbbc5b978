from __future__ import annotations

import json
from pathlib import Path

import pytest

from piecegraph.cache.store.store import Store
from tests.tools.cache.models import VERSIONS, CacheCommand, save_kernels, save_model, save_piece
from tests.tools.cache.reading.test_ls import rewrite


def test_a_plan_as_text(store: Store, cache: CacheCommand) -> None:
    model = save_model(store, "LlamaForCausalLM")
    lines = cache("show", model.plan.key[:10]).splitlines()
    assert lines[0] == f"key       {model.plan.key}"
    assert "model     LlamaForCausalLM 134.5M bfloat16" in lines
    assert "seconds   split 250 ms, trace 1.5 s" in lines
    assert "passes    fuse-act-mul 3, select-rows-early 1" in lines
    dynamic, static = (piece.key[:12] for piece in model.pieces)
    assert f"{dynamic}       0          3  any num_tokens      9        2     2.50  complete" in lines
    assert f"{static}       0          3  num_tokens = 8      9        2     2.50  complete" in lines
    assert "config.compile_sizes = [8]" in lines
    assert 'model.modules.layers.2.norm.class = "RMSNorm"' in lines
    assert any(line.startswith("source") and line.endswith(model.plan.blobs["source"].digest) for line in lines)


def test_a_plan_as_json(store: Store, cache: CacheCommand) -> None:
    model = save_model(store)
    record = cache.json("show", model.plan.key)
    assert record["factors"] == model.plan.factors
    assert record["notes"] == model.plan.notes
    assert record["versions"] == VERSIONS
    assert record["seconds"] == {"trace": 1.5, "split": 0.25}
    assert record["passes"] == {"select-rows-early": 1, "fuse-act-mul": 3}
    assert record["blobs"]["plan"] == {
        "digest": model.plan.blobs["plan"].digest,
        "size": model.plan.blobs["plan"].size,
    }
    assert record["pieces"] == [
        {
            "key": piece.key,
            "unique": 0,
            "shared_by": 3,
            "size": size,
            "takes": ["num_tokens"],
            "nodes": 9,
            "kernels": 2,
            "compile_seconds": 2.5,
            "state": "complete",
        }
        for piece, size in zip(model.pieces, (None, 8), strict=True)
    ]
    assert "code" not in record


def test_a_piece_names_the_plans_made_of_it(store: Store, cache: CacheCommand) -> None:
    model = save_model(store)
    record = cache.json("show", model.pieces[0].key)
    assert (record["kind"], record["pieces"], record["plans"]) == ("piece", [], [model.plan.key])
    assert f"part of   {model.plan.key[:12]}" in cache("show", model.pieces[0].key).splitlines()


def test_kernels_are_told_by_their_functions(store: Store, cache: CacheCommand, tmp_path: Path) -> None:
    plan = save_model(store).plan.key
    key = save_kernels(store, plan, "add", "mul").key
    record = cache.json("show", key)
    assert (record["kind"], record["functions"], record["plans"]) == ("kernels", {"add": 1, "mul": 1}, [plan])
    assert "kernels   add 1, mul 1" in cache("show", key).splitlines()
    files = cache.json("show", key, "--dump", str(tmp_path / "look"))["files"]
    assert "kernel/000000000000/add.json" in files


def test_generated_code(store: Store, cache: CacheCommand) -> None:
    model = save_model(store, eps=0.5)
    out = cache("show", model.plan.key, "--code")
    assert "# ---- stitched.py ----" in out
    assert "    x = piece_0(x)  # eps 0.5" in out
    assert "# ---- piece_0_size_8/code.py ----\ndef call(args):  # layer eps=0.5\n    return args" in out
    code = cache.json("show", model.plan.key, "--code")["code"]
    assert list(code) == ["stitched.py", "piece_0/code.py", "piece_0_size_8/code.py"]
    assert code["piece_0/code.py"] == "def call(args):  # layer eps=0.5\n\treturn args\n"


def test_what_cannot_be_loaded_is_shown_and_its_code_is_not(store: Store, cache: CacheCommand) -> None:
    """Code is printed only after its digest was found right."""
    entry = save_piece(store, "one")
    store.layout.blob(entry.blobs["code"].digest).write_bytes(b"import os; os.abort()")
    assert cache.json("show", entry.key)["factors"] == entry.factors
    cache("show", entry.key, "--code", code=1)
    assert f"entry {entry.key[:12]} cannot be looked into: it is blob corrupt (code" in cache.err
    assert "abort" not in cache.out + cache.err


def test_a_plan_with_a_bad_piece_shows_the_state_of_it(store: Store, cache: CacheCommand) -> None:
    model = save_model(store)
    store.delete(model.pieces[1].key)
    record = cache.json("show", model.plan.key)
    assert (record["state"], [piece["state"] for piece in record["pieces"]]) == (
        "pieces missing",
        ["complete", "absent"],
    )


def test_an_entry_of_another_version(store: Store, cache: CacheCommand) -> None:
    """Its pieces come from its notes: what its plan says may mean something else."""
    model = save_model(store)
    rewrite(store, model.plan.key, {"format": 99}, sign=True)
    record = cache.json("show", model.plan.key)
    assert (record["format"], record["state"], record["is_loadable"]) == (99, "other version", False)
    assert [(piece["key"], piece["unique"]) for piece in record["pieces"]] == [
        (piece.key, None) for piece in model.pieces
    ]


def test_a_file_of_which_nothing_can_be_made_out(store: Store, cache: CacheCommand) -> None:
    key = save_piece(store, "one").key
    store.layout.entry(key).write_bytes(b"[")
    cache("show", key, code=1)
    assert f"entry {key[:12]} cannot be made out: it is corrupt (no canonical JSON" in cache.err


def test_an_unknown_key(store: Store, cache: CacheCommand) -> None:
    key = save_piece(store, "one").key
    wrong = key[:11] + ("0" if key[11] != "0" else "1")
    cache("show", wrong, code=2)
    assert f"no key begins with '{wrong}'. Did you mean {key[:12]}?" in cache.err


def test_an_empty_cache_has_nothing_to_show(cache: CacheCommand) -> None:
    cache("show", "ab", code=2)
    assert "there is no entry 'ab': the cache is empty" in cache.err


def test_a_dump_is_files_one_can_read(store: Store, cache: CacheCommand, tmp_path: Path) -> None:
    model = save_model(store)
    folder = tmp_path / "look" / "here"
    files = cache.json("show", model.plan.key, "--dump", str(folder))["files"]
    there = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert sorted(files) == there
    assert {
        "stitched.py",
        "plan.json",
        "guards.json",
        "piece_0/graph.txt",
        "piece_0/code.py",
        f"piece_0/library/{'e' * 64}",
        "piece_0_size_8/graph.txt",
    } < set(there)
    assert not [name for name in there if "artifact" in name]
    assert json.loads((folder / "plan.json").read_text())["pieces"] == [model.pieces[0].key]
    assert (folder / "piece_0" / "graph.txt").read_text().startswith("layer eps=1e-06: placeholder")
    assert (folder / "piece_0" / "library" / ("e" * 64)).read_bytes().startswith(b"\x7fELF\x00")


def test_a_dump_replaces_nothing(store: Store, cache: CacheCommand, tmp_path: Path) -> None:
    key = save_piece(store, "one").key
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    cache("show", key, "--dump", str(tmp_path / "full"), code=1)
    assert "is not empty; name a folder that is new or empty" in cache.err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_code_and_dump_are_two_things(cache: CacheCommand) -> None:
    cache("show", "ab", "--code", "--dump", "x", code=2)
    assert "give one of the two" in cache.err


@pytest.mark.parametrize("option", ["--code", "--dump"])
def test_an_entry_without_code(store: Store, cache: CacheCommand, tmp_path: Path, option: str) -> None:
    """What other versions store is dumped under its role's name."""
    from tests.tools.cache.models import save

    key = save(store, {"kind": "future"}, {"hologram/../../x": b"\x00\x01", ".hidden": b"2"}, {}, {}).key
    if option == "--code":
        cache("show", key, "--code", code=1)
        assert "holds no generated code; `--dump DIR` writes what it holds" in cache.err
    else:
        assert cache.json("show", key, "--dump", str(tmp_path / "d"))["files"] == ["hidden", "hologram/x"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "d", "data"]
