from __future__ import annotations

from piecegraph.cache.store.store import Store
from piecegraph.tools.cache.entries.contents import ContentFile, Kind
from piecegraph.tools.cache.reading.diff import FileDifference, diff_files
from tests.tools.cache.models import CacheCommand, save_model, save_piece


def test_factors_graphs_and_code(store: Store, cache: CacheCommand) -> None:
    left, right = (save_model(store, "Llama", eps=eps).plan.key for eps in (0.5, 0.25))
    record = cache.json("diff", left[:16], right[:16])
    assert (record["left"], record["right"]) == (left, right)
    assert [each["path"] for each in record["factors"]] == [f"model.modules.layers.{n}.norm.eps" for n in range(3)]
    files = {each["path"]: each for each in record["files"]}
    assert [each["kind"] for each in record["files"]] == ["graph"] * 2 + ["code"] * 3 + ["data"] * 3
    assert files["piece_0/graph.txt"]["diff"].splitlines() == [
        "--- a/piece_0/graph.txt",
        "+++ b/piece_0/graph.txt",
        "@@ -1 +1 @@",
        "-layer eps=0.5: placeholder -> mul -> output",
        "+layer eps=0.25: placeholder -> mul -> output",
    ]
    assert "-    x = piece_0(x)  # eps 0.5" in files["stitched.py"]["diff"]
    assert files["plan.json"]["diff"] == ""


def test_as_text(store: Store, cache: CacheCommand) -> None:
    left, right = (save_piece(store, name).key for name in ("one", "two"))
    lines = cache("diff", left, right).splitlines()
    assert lines[:4] == [
        "1 factors differ",
        "  graph",
        f'    {left[:12]}  "one"',
        f'    {right[:12]}  "two"',
    ]
    assert lines[4] == "3 files differ"
    assert "+def call(args):  # two" in lines
    assert lines[-1] == f"  library/{'e' * 64} (data)"


def test_an_entry_and_itself(store: Store, cache: CacheCommand) -> None:
    key = save_model(store).plan.key
    assert cache("diff", key, key).splitlines() == ["the factors are the same", "graphs and code are the same"]


def test_factors_only(store: Store, cache: CacheCommand) -> None:
    left, right = (save_piece(store, name).key for name in ("one", "two"))
    assert cache.json("diff", left, right, "--factors-only")["files"] is None
    assert cache.err == ""


def test_of_an_entry_that_cannot_be_loaded_only_factors_are_compared(store: Store, cache: CacheCommand) -> None:
    one, two = (save_piece(store, name) for name in ("one", "two"))
    store.layout.blob(two.blobs["code"].digest).write_bytes(b"other")
    record = cache.json("diff", one.key, two.key)
    assert (len(record["factors"]), record["files"]) == (1, None)
    assert f"only factors are compared: entry {two.key[:12]} cannot be looked into: it is blob corrupt" in cache.err


def test_a_file_of_which_nothing_can_be_made_out(store: Store, cache: CacheCommand) -> None:
    one, two = (save_piece(store, name).key for name in ("one", "two"))
    store.layout.entry(two).write_bytes(b"{")
    cache("diff", one, two, code=1)
    assert f"entry {two[:12]} cannot be compared: it is corrupt" in cache.err


def test_a_file_that_only_one_side_has() -> None:
    graph = ContentFile("graph.txt", Kind.GRAPH, b"mul\n")
    binary = ContentFile("code.py", Kind.CODE, b"\x00")
    assert diff_files([graph], [binary]) == (
        FileDifference("graph.txt", "graph", "--- a/graph.txt\n+++ b/graph.txt\n@@ -1 +0,0 @@\n-mul"),
        FileDifference("code.py", "code", ""),
    )
