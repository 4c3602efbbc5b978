from __future__ import annotations

from piecegraph.cache.store import Store
from piecegraph.tools.cache.listing import read_listing
from tests.tools.cache.models import save_kernels, save_model, save_piece


def test_a_model_goes_with_the_pieces_that_only_it_is_made_of(store: Store) -> None:
    """Models that differ in what no piece depends on share all of them."""
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
