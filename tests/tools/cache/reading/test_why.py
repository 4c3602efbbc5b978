from __future__ import annotations

from piecegraph.cache.store.store import Store
from tests.tools.cache.models import H200, NOW, CacheCommand, save_model, save_piece


def test_an_entry_is_compared_with_the_nearest_that_was_there_before_it(store: Store, cache: CacheCommand) -> None:
    """An earlier entry shows why the later one was compiled, because only the earlier one could have been hit."""
    store.clock = lambda: NOW
    far = save_model(store, "Llama", machine=H200, config={})
    near = save_model(store, "Llama", eps=1e-5)
    store.clock = lambda: NOW + 60
    model = save_model(store, "Llama")
    store.clock = lambda: NOW + 120
    save_model(store, "Llama", dynamic_dims={})
    (answer,) = cache.json("why", model.plan.key[:16])
    assert (answer["asked"], answer["key"], answer["is_hit"]) == (model.plan.key[:16], model.plan.key, True)
    assert answer["nearest"]["key"] == near.plan.key
    assert answer["nearest"]["differences"] == [
        {"path": f"model.modules.layers.{layer}.norm.eps", "left": 1e-6, "right": 1e-5} for layer in range(3)
    ]
    assert far.plan.key not in cache.out


def test_the_first_entry_is_compared_with_none(store: Store, cache: CacheCommand) -> None:
    """A later entry cannot have kept it from being hit."""
    store.clock = lambda: NOW
    first = save_model(store, "Llama").plan.key
    store.clock = lambda: NOW + 60
    save_model(store, "Llama", eps=1e-5)
    assert cache.json("why", first)[0]["nearest"] is None
    assert cache("why", first).splitlines() == [
        f"{first[:12]}  hit: it can be loaded",
        "  no entry of its kind was there before it",
    ]


def test_a_model_is_compared_with_one_of_its_class_whatever_wraps_it(store: Store, cache: CacheCommand) -> None:
    """`LLM` compiles all models in one wrapper."""

    def wrapped(name: str, **settings: int) -> str:
        modules = {"": {"class": "Wrapper"}, "model": {"class": name, **settings}}
        return save_model(store, name, model={"class": "Wrapper", "modules": modules}).plan.key

    store.clock = lambda: NOW
    llama = wrapped("Llama", layers=1, heads=1, experts=1)
    wrapped("Qwen")
    store.clock = lambda: NOW + 60
    (answer,) = cache.json("why", wrapped("Llama"))
    assert answer["nearest"]["key"] == llama


def test_why_as_text(store: Store, cache: CacheCommand) -> None:
    store.clock = lambda: NOW
    old = save_model(store, "Llama", eps=1e-5).plan.key[:12]
    store.clock = lambda: NOW + 1
    new = save_model(store, "Llama").plan.key[:12]
    assert cache("why", new).splitlines() == [
        f"{new}  hit: it can be loaded",
        f"  nearest: {old} (complete, Llama 134.5M bfloat16), which differs in",
        "  model.modules.layers.0.norm.eps and 2 more like it",
        f"    {new}  1e-06",
        f"    {old}  1e-05",
    ]


def test_a_piece_is_compared_with_one_of_the_same_graph(store: Store, cache: CacheCommand) -> None:
    """Another piece of the same model differs in less, and computes something else."""
    model = save_model(store)
    alone = save_piece(store, "other", machine=H200).key
    (answer,) = cache.json("why", alone)
    assert answer["nearest"]["key"] in {piece.key for piece in model.pieces}
    same = save_piece(store, "other", passes=["a", "b"], options={}, build={}).key
    (answer,) = cache.json("why", same)
    assert answer["nearest"]["key"] == alone
    differing = {difference["path"] for difference in answer["nearest"]["differences"]}
    assert {"machine.device", "machine.gpu", "passes[0]"} < differing
    assert "graph" not in differing


def test_a_bad_entry_says_what_keeps_it_from_being_loaded(store: Store, cache: CacheCommand) -> None:
    entry = save_piece(store, "one")
    store.layout.blob(entry.blobs["code"].digest).unlink()
    (answer,) = cache.json("why", entry.key)
    assert (answer["is_hit"], answer["reason"], answer["nearest"]) == (False, "blob missing", None)
    out = cache("why", entry.key)
    assert out.startswith(f"{entry.key[:12]}  miss: blob missing: code (")
    assert "nearest" not in out
    store.layout.entry(entry.key).write_bytes(b"{")
    assert cache.json("why", entry.key)[0]["reason"] == "corrupt"


def test_a_plan_without_a_piece_is_a_miss(store: Store, cache: CacheCommand) -> None:
    model = save_model(store)
    store.delete(model.pieces[0].key)
    (answer,) = cache.json("why", model.plan.key)
    assert (answer["is_hit"], answer["reason"]) == (False, "pieces missing")


def test_several_at_once(store: Store, cache: CacheCommand) -> None:
    keys = [save_piece(store, name).key for name in ("a", "b")]
    assert [answer["key"] for answer in cache.json("why", *keys)] == keys


def test_an_empty_cache_gives_no_comparison(cache: CacheCommand) -> None:
    assert cache.json("why", "abcd") == []
    assert "there is no cache at" in cache.err


def test_an_unknown_key(store: Store, cache: CacheCommand) -> None:
    save_piece(store, "one")
    cache("why", "0123456789abcdef", code=2)
    assert "no key begins with '0123456789abcdef'" in cache.err
