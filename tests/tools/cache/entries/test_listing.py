from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piecegraph.cache.disk.canonical import canonical_json
from piecegraph.cache.store.entry import to_document
from piecegraph.cache.store.store import Store
from piecegraph.tools.cache.entries.listing import Listing, read_listing
from piecegraph.tools.cache.entries.usage import usage
from piecegraph.tools.cache.reading import du, ls, show
from piecegraph.tools.command_line.records import as_plain
from tests.cache.cache_roots import tampered
from tests.tools.cache.models import (
    H200,
    NOW,
    PROCESSOR,
    CacheCommand,
    save_kernels,
    save_library,
    save_model,
    save_piece,
)
from tests.tools.cache.reading.test_ls import rewrite


def test_a_model_goes_with_the_pieces_that_only_it_is_made_of(store: Store) -> None:
    """Models that differ only in what no piece depends on share all pieces."""
    first, second = save_model(store, "First"), save_model(store, "Second")
    third = save_model(store, "Third", eps=0.5)
    alone = save_piece(store, "alone").key
    listing = read_listing(store)
    shared = [piece.key for piece in first.pieces]
    assert listing.with_pieces([second.plan.key]) == [second.plan.key, *shared]
    assert listing.with_own_pieces([second.plan.key]) == [second.plan.key]
    both = [first.plan.key, second.plan.key]
    assert listing.with_own_pieces(both) == [both[0], *shared, both[1]]
    assert listing.with_own_pieces([third.plan.key, alone]) == [
        third.plan.key,
        *(piece.key for piece in third.pieces),
        alone,
    ]
    assert listing.with_own_pieces([shared[0]]) == [shared[0]]


def test_kernels_belong_to_the_plan_they_are_for(store: Store) -> None:
    first, second = save_model(store, "First"), save_model(store, "Second")
    kernels, other = save_kernels(store, first.plan.key, "add"), save_kernels(store, "0" * 64, "add")
    listing = read_listing(store)
    assert listing.with_own_pieces([first.plan.key]) == [first.plan.key, kernels.key]
    assert kernels.key not in listing.with_pieces([second.plan.key])
    assert listing.models(listing.by_key[kernels.key]) == ("First 134.5M bfloat16",)
    assert listing.models(listing.by_key[other.key]) == ()
    sizes = [listing.size_with_pieces(listing.by_key[model.plan.key]) for model in (first, second)]
    own = listing.by_key[kernels.key].listed.size
    plans = [listing.by_key[model.plan.key].listed.size for model in (first, second)]
    assert sizes[0] - sizes[1] == own + plans[0] - plans[1]


def test_a_library_belongs_to_every_plan_for_its_processor(store: Store) -> None:
    other_cpu = {"device": "cpu", "cpu": {**PROCESSOR, "isa": "AVX512"}}
    first, second = save_model(store, "First"), save_model(store, "Second")
    elsewhere, on_gpu = save_model(store, "Third", machine=other_cpu), save_model(store, "Fourth", machine=H200)
    ours, theirs = save_library(store, "attention"), save_library(store, "attention", other_cpu)
    listing = read_listing(store)
    for model, libraries in ((first, {ours.key}), (second, {ours.key}), (elsewhere, {theirs.key}), (on_gpu, set())):
        assert set(listing.with_pieces([model.plan.key])) & {ours.key, theirs.key} == libraries
    assert ours.key not in listing.with_own_pieces([first.plan.key])
    assert theirs.key in listing.with_own_pieces([elsewhere.plan.key])
    assert listing.models(listing.by_key[theirs.key]) == ("Third 134.5M bfloat16",)


def test_pieces_that_are_not_there_are_nobodys(store: Store) -> None:
    model = save_model(store)
    store.delete(model.pieces[0].key)
    listing = read_listing(store)
    assert listing.with_pieces([model.plan.key]) == [model.plan.key, model.pieces[1].key]
    assert listing.by_key[model.plan.key].detail == "1 of 2 cannot be loaded"


def test_what_entries_share_counts_once(store: Store) -> None:
    model = save_model(store)
    listing = read_listing(store)
    plan = listing.by_key[model.plan.key]
    apart = sum(listing.by_key[entry.key].listed.size for entry in (model.plan, *model.pieces))
    both = {ref.digest: ref.size for piece in model.pieces for ref in piece.blobs.values()}
    twice = sum(ref.size for piece in model.pieces for ref in piece.blobs.values())
    assert listing.size_with_pieces(plan) == apart - (twice - sum(both.values()))


many = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(data=st.data())
def test_an_odd_entry_breaks_no_listing(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """The entry is signed, so that every field is read: numbers no float holds, lone surrogates, other types."""
    store = Store.open(tmp_path_factory.mktemp("cache"))
    model = save_model(store)
    which = data.draw(st.sampled_from([model.plan, model.pieces[0]]))
    document = to_document(which)
    if data.draw(st.booleans()):  # where people look
        document["notes"] = data.draw(tampered(document["notes"]))
    else:
        document = data.draw(tampered(document))
    body = canonical_json(document)
    file = {"entry": document, "signature": store.signer.sign("entry", body)}
    store.layout.entry(which.key).write_bytes(canonical_json(file))
    listing = read_listing(store)
    assert len(listing.rows) == 3
    printed(listing, store)


@pytest.mark.parametrize("depth", [100, 900, 20_000, 200_000])
def test_a_deep_entry_breaks_no_listing(store: Store, cache: CacheCommand, depth: int) -> None:
    """Some of these depths json itself refuses, others only a recursive walk."""
    key = save_piece(store, "deep").key
    path = store.layout.entry(key)
    nest = "[" * depth + "]" * depth
    file = json.loads(path.read_bytes())
    file["entry"]["notes"] = file["entry"]["factors"]["graph"] = "NEST"
    body = canonical_json(file["entry"]).replace(b'"NEST"', nest.encode())
    signature = canonical_json(store.signer.sign("entry", body))
    path.write_bytes(b'{"entry":' + body + b',"signature":' + signature + b"}")
    other = save_piece(store, "other").key
    for command in ("ls", "du"):
        cache(command)
        cache(command, "--json")
    cache("show", other)
    cache("diff", other, key, "--factors-only", code=1)
    cache("why", other)
    cache("why", key)
    for arguments in ((), ("--json",)):
        cache("show", key, *arguments, code=1)
        assert key[:12] in cache.err


def test_bytes_that_are_no_text_break_no_listing(store: Store, cache: CacheCommand) -> None:
    key, other = save_piece(store, "one").key, save_piece(store, "other").key
    store.layout.entry(key).write_bytes(b'{"entry":{"key":"\xff\xfe"},"signature":{}}')
    (store.layout.entries / os.fsdecode(b"\xff.json")).write_bytes(b"{}")
    assert {row["key"]: row["state"] for row in cache.json("ls")} == {key: "corrupt", other: "complete"}
    cache("du")
    cache("show", other)
    assert "corrupt" in (cache("show", key, code=1) or cache.err)


def test_a_note_that_no_float_holds_is_left_out(store: Store, cache: CacheCommand) -> None:
    model = save_model(store, "Tiny")
    rewrite(store, model.plan.key, {"notes": {**model.plan.notes, "num_parameters": 10**400}}, sign=True)
    assert "Tiny bfloat16" in cache("ls")
    cache("du")
    cache("show", model.plan.key)


def printed(listing: Listing, store: Store) -> None:
    """Assert that the output of `ls`, `du` and `show` can be printed."""
    lines = ls._lines(listing.rows, listing, NOW)
    json.dumps([ls.as_record(row, listing) for row in listing.rows])
    for order in ls.ORDERS.values():
        sorted(listing.rows, key=order)
    rooms = du.by_model(listing)
    json.dumps(as_plain(rooms))
    lines += list(du._lines(usage(store.layout), rooms))
    for row in listing.rows:
        if row.view is not None:
            record = show.as_record(store, row, listing)
            json.dumps(record)
            lines += list(show._lines(record, NOW))
    "\n".join(lines).encode()
