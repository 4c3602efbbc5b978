"""The slots of adapters: shared by requests, evicted by last use, and never while in use or pinned."""

from __future__ import annotations

from dataclasses import dataclass

from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.lora_slots import LoraAssignment, LoraSlots, WaitingAdapters
from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.scheduler import Scheduler
from tests.runner.scheduling.make_request import make_request


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


def test_an_adapter_that_waits_ends_the_one_with_the_fewest_requests() -> None:
    """The adapter that is to end takes no more requests in this step; the other one does, and the next step is free."""
    slots = LoraSlots(2)
    for adapter in (A, A, B):
        slots.acquire(adapter)
    step = WaitingAdapters(slots)
    assert [step.has_to_wait(each) for each in (B, C, C, B, A)] == [False, True, True, True, False]
    assert not WaitingAdapters(slots).has_to_wait(B)
    slots.release(B)
    assert not WaitingAdapters(slots).has_to_wait(C)


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


def scheduler(num_slots: int, max_num_seqs: int = 8) -> Scheduler:
    return Scheduler(
        kv_cache=KVCacheManager(num_blocks=64, block_size=4, max_num_batched_tokens=64),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        watermark=0.0,
        lora_slots=LoraSlots(num_slots),
    )


def with_adapter(name: str, adapter: Named | None, prompt: int | list[int] = 3) -> Request:
    request = make_request(name, prompt)
    request.lora = adapter
    return request


def step(scheduler: Scheduler) -> dict[str, LoraAssignment | None]:
    """Run a step and return the slots of the requests that it adds."""
    output = scheduler.schedule()
    scheduler.complete_step(output, {item.request_id: 5 for item in output.sampled})
    return {added.request_id: added.lora for added in output.added}


def test_a_request_whose_adapter_has_no_slot_delays_no_other() -> None:
    """It takes the slot that is free first, before others that came later."""
    made = scheduler(num_slots=1)
    for name, adapter in (("a", A), ("b", B), ("plain", None), ("c", C)):
        made.add(with_adapter(name, adapter))
    assert step(made) == {"a": LoraAssignment(0, A), "plain": None}
    made.finish("plain", "stop")
    assert step(made) == {}
    made.finish("a", "stop")
    assert step(made) == {"b": LoraAssignment(0, B)}


def test_an_adapter_that_many_use_does_not_keep_another_waiting() -> None:
    """While B waits, A is given to no further request; C, in the other slot with more requests, still is."""
    made = scheduler(num_slots=2)
    for name, adapter in (("a", A), ("c1", C), ("c2", C)):
        made.add(with_adapter(name, adapter))
    step(made)
    for name, adapter in (("b", B), ("a2", A), ("c3", C)):
        made.add(with_adapter(name, adapter))
    assert set(step(made)) == {"c3"}
    made.finish("a", "stop")
    assert step(made) == {"b": LoraAssignment(1, B)}
    for name in ("c1", "c2", "c3"):
        made.finish(name, "stop")
    assert set(step(made)) == {"a2"}


def test_prefixes_are_those_of_an_adapters_contents() -> None:
    made, prompt = scheduler(num_slots=2), [*range(9)]
    for name, adapter, num_cached in (("1", A, 0), ("2", B, 0), ("3", None, 0), ("4", Named(A.digest), 8), ("5", B, 8)):
        made.add(with_adapter(name, adapter, prompt))
        output = made.schedule()
        assert output.added[0].num_computed_tokens == num_cached, name
        made.complete_step(output, {item.request_id: 5 for item in output.sampled})
        made.finish(name, "stop")


def test_a_preempted_request_gets_a_slot_again() -> None:
    made = scheduler(num_slots=1)
    made.add(with_adapter("a", A))
    step(made)
    made.start_over(list(made._requests.values()))
    assert step(made) == {"a": LoraAssignment(0, A)}
