"""The slots of adapters: shared by requests, evicted by last use, and never while in use or pinned."""

from __future__ import annotations

from dataclasses import dataclass

from piecegraph.runner.scheduling.lora_slots import LoraSlots


@dataclass(frozen=True)
class Named:
    digest: bytes


A, B, C = (Named(bytes([number])) for number in range(3))


def test_requests_share_the_slot_of_their_adapter() -> None:
    slots = LoraSlots(2)
    first, second, other = slots.acquire(A), slots.acquire(A), slots.acquire(B)
    assert first.to_write is A and second.to_write is None and first.slot == second.slot != other.slot
    assert slots.num_users(A.digest) == 2 and slots.held == {A.digest, B.digest}


def test_an_adapter_stays_after_its_requests_and_the_least_recently_used_goes() -> None:
    slots = LoraSlots(2)
    for adapter in (A, B, A):
        slots.acquire(adapter)
        slots.release(adapter)
    assert slots.acquire(C).to_write is C  # in B's place
    assert slots.resident == (A.digest, C.digest)
    assert slots.acquire(A).to_write is None


def test_what_is_in_use_or_pinned_is_not_evicted() -> None:
    pinned: set[bytes] = set()
    slots = LoraSlots(2, pinned)
    slots.acquire(A)
    slots.acquire(B)
    assert not slots.can_hold(C) and slots.can_hold(A)
    slots.release(A)
    assert slots.can_hold(C)
    pinned.add(A.digest)
    assert not slots.can_hold(C)


def test_the_adapters_of_the_fewest_requests_end_first() -> None:
    slots = LoraSlots(3)
    for adapter in (A, A, B, C, C, C):
        slots.acquire(adapter)
    assert slots.least_used(1, ()) == {B.digest}
    assert slots.least_used(2, {B.digest}) == {A.digest, C.digest}
    assert slots.least_used(0, ()) == frozenset()


def test_after_a_failed_step_every_slot_is_written_again() -> None:
    slots = LoraSlots(1)
    slots.acquire(A)
    slots.start_over()
    assert slots.acquire(A).to_write is A and slots.num_users(A.digest) == 1
