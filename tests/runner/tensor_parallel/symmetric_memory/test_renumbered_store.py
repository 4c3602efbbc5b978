"""Ranks meet at a store though their processes have counted different numbers of earlier rendezvous."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from piecegraph.runner.tensor_parallel.symmetric_memory.renumbered_store import RenumberedStore


def test_ranks_with_different_counts_read_each_other() -> None:
    """The keys have the form of torch; a prefix store before them is called from C++, as the rendezvous calls it."""
    shared = dist.HashStore()
    ranks = [(0, RenumberedStore(shared), 6), (1, RenumberedStore(shared), 0)]
    for step in range(3):
        for rank, store, begun in ranks:
            dist.PrefixStore("a", store).set(f"CUDASymmetricMemory/{begun + step}/{rank}", f"{rank} {step}")
        for rank, store, begun in ranks:
            key = f"CUDASymmetricMemory/{begun + step}/{1 - rank}"
            seen = dist.PrefixStore("a", store)
            seen.wait([key], timedelta(seconds=5))
            assert seen.get(key) == f"{1 - rank} {step}".encode()


def test_other_keys_stay_as_they_are() -> None:
    shared = dist.HashStore()
    store = RenumberedStore(shared)
    store.set("host/7", "a")
    store.wait(["host/7"])
    assert shared.get("host/7") == b"a" == store.get("host/7")
