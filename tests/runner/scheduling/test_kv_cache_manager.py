"""Blocks of requests: what they hold, what is found again, what windows let go."""

from __future__ import annotations

import pytest

from piecegraph.runner.scheduling.kv_cache_group import KVCacheGroup
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.request import Request
from tests.runner.scheduling.make_request import make_request

FULL = KVCacheGroup()


def window(tokens: int) -> KVCacheGroup:
    return KVCacheGroup(sliding_window=tokens)


def make_manager(
    *groups: KVCacheGroup,
    num_blocks: int = 16,
    max_step_tokens: int = 64,
    enable_prefix_caching: bool = True,
    cached_states: int | None = None,
) -> KVCacheManager:
    """Blocks of 4 tokens."""
    return KVCacheManager(
        num_blocks=num_blocks,
        block_size=4,
        max_num_batched_tokens=max_step_tokens,
        groups=groups or (FULL,),
        enable_prefix_caching=enable_prefix_caching,
        cached_states=cached_states,
    )


def compute(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> bool:
    """Admit `request` and compute it, its prefix from the cache; False if it does not fit."""
    hit = manager.find_prefix(request)
    num_tokens = request.num_tokens - hit.num_tokens if num_tokens is None else num_tokens
    if not manager.admit(request, hit, num_tokens):
        return False
    request.num_computed_tokens = hit.num_tokens + num_tokens
    return True


def compute_and_leave(manager: KVCacheManager, request: Request) -> None:
    """`compute`, name all full blocks, and let go of them."""
    assert compute(manager, request)
    manager.register(request, request.num_tokens)
    manager.free(request)


def advance(manager: KVCacheManager, request: Request, num_tokens: int) -> None:
    """Compute more, of new tokens."""
    request.output_token_ids += range(num_tokens)
    assert manager.extend(request, num_tokens) is not None
    request.num_computed_tokens += num_tokens


def num_hits(manager: KVCacheManager, prompt: list[int], **options: str) -> int:
    return manager.find_prefix(make_request("probe", prompt, **options)).num_tokens  # type: ignore[arg-type]


def test_blocks_follow_the_tokens() -> None:
    """A block more only when the last is full; the request is told in `num_slots` how far it can go."""
    manager = make_manager()
    request = make_request("a", 5)
    assert compute(manager, request)
    assert len(manager.table("a")) == 2 and request.num_slots == 8
    added = manager.extend(request, 4)
    assert added is not None
    (blocks,) = added
    assert (blocks.request_id, blocks.group, blocks.start) == ("a", 0, 2)
    assert manager.table("a")[2:] == blocks.block_ids and request.num_slots == 12
    manager.free(request)
    assert manager.num_free_blocks == 16 and request.num_slots == 0


def test_too_few_blocks_change_nothing() -> None:
    manager = make_manager(num_blocks=3)
    a, b = make_request("a", 8), make_request("b", 8)
    assert compute(manager, a)
    assert not compute(manager, b)
    assert manager.num_free_blocks == 1
    a.num_computed_tokens = 8
    assert manager.extend(a, 5) is None
    assert manager.num_free_blocks == 1 and len(manager.table("a")) == 2


def test_a_request_is_admitted_only_if_its_whole_prompt_fits() -> None:
    """Not only its first chunk; and a margin is left if asked for."""
    manager = make_manager(num_blocks=4)
    request = make_request("a", 17)
    assert not compute(manager, request, 4)
    request = make_request("b", 16)
    hit = manager.find_prefix(request)
    assert not manager.admit(request, hit, 4, num_spared_blocks=1)
    assert manager.admit(request, hit, 4)
    assert manager.num_free_blocks == 3


def test_a_prefix_is_found_in_whole_blocks() -> None:
    manager = make_manager()
    prompt = list(range(12))
    compute_and_leave(manager, make_request("a", prompt))
    assert manager.num_free_blocks == 16
    assert num_hits(manager, [*prompt, 99]) == 12
    assert num_hits(manager, prompt[:11]) == 8
    assert num_hits(manager, [*prompt[:5], 99, 99, 99, 99]) == 4
    assert num_hits(manager, [99, *prompt[1:]]) == 0


def test_one_token_is_always_computed() -> None:
    """A prompt that is cached as a whole still needs the logits of its last token."""
    manager = make_manager()
    compute_and_leave(manager, make_request("a", list(range(8))))
    assert num_hits(manager, list(range(8))) == 4


def test_a_hit_shares_blocks() -> None:
    """Held or free, a found block is not handed out to others while it is used."""
    manager = make_manager(num_blocks=4)
    a, b = make_request("a", list(range(8))), make_request("b", [*range(8), 9])
    assert compute(manager, a)
    manager.register(a, 8)
    assert compute(manager, b)
    assert manager.table("b")[:2] == manager.table("a")
    manager.free(a)
    assert manager.num_free_blocks == 1
    manager.free(b)
    assert manager.num_free_blocks == 4


def test_free_blocks_of_a_hit_count_as_needed() -> None:
    """They are free, but not for the request's new tokens."""
    manager = make_manager(num_blocks=4)
    compute_and_leave(manager, make_request("a", list(range(8))))
    other = make_request("b", 4)
    assert compute(manager, other)
    request = make_request("c", [*range(8), *range(100, 106)])
    assert manager.find_prefix(request).num_tokens == 8
    assert not compute(manager, request)
    manager.free(other)
    assert compute(manager, request)


def test_prefixes_live_longer_than_tails() -> None:
    manager = make_manager(num_blocks=4)
    compute_and_leave(manager, make_request("a", list(range(16))))
    assert compute(manager, make_request("b", 8))
    assert num_hits(manager, [*range(16), 99]) == 8


def test_groups_lose_a_tail_together() -> None:
    """A prefix is of use only while all groups hold it, so pressure must not take one group whole first."""
    manager = make_manager(FULL, window(100), num_blocks=8)
    compute_and_leave(manager, make_request("a", list(range(16))))
    assert compute(manager, make_request("b", 8))
    assert num_hits(manager, [*range(16), 99]) == 8


@pytest.mark.parametrize("salt", ["", "mine"])
def test_salts_keep_prefixes_apart(salt: str) -> None:
    manager = make_manager()
    compute_and_leave(manager, make_request("a", list(range(8)), cache_salt="mine"))
    assert num_hits(manager, [*range(8), 9], cache_salt=salt) == (8 if salt == "mine" else 0)


def test_prompt_logprobs_and_a_switched_off_cache_find_nothing() -> None:
    manager = make_manager()
    compute_and_leave(manager, make_request("a", list(range(8))))
    wants_logprobs = make_request("b", [*range(8), 9], prompt_logprobs=True)
    assert manager.find_prefix(wants_logprobs).num_tokens == 0
    manager = make_manager(enable_prefix_caching=False)
    compute_and_leave(manager, make_request("a", list(range(8))))
    assert num_hits(manager, [*range(8), 9]) == 0 and manager.pool.num_named == 0


def test_a_block_that_is_not_registered_is_not_found() -> None:
    """Computed is not enough: the caller says up to where tokens are known and scheduled earlier."""
    manager = make_manager()
    request = make_request("a", list(range(12)))
    assert compute(manager, request)
    manager.register(request, 7)
    assert num_hits(manager, [*range(12), 99]) == 4
    manager.register(request, 12)
    assert num_hits(manager, [*range(12), 99]) == 12


def test_outputs_are_found_like_prompts() -> None:
    manager = make_manager()
    request = make_request("a", [1, 2, 3])
    assert compute(manager, request)
    advance(manager, request, 5)
    manager.register(request, 8)
    assert num_hits(manager, [1, 2, 3, 0, 1, 2, 3, 4, 99]) == 8


def test_blocks_before_a_window_are_released() -> None:
    """Window 6, 13 tokens computed: the next sees from 8 on, so blocks 0 and 1 go, and stay to be found."""
    manager = make_manager(window(6))
    request = make_request("a", 13)
    assert compute(manager, request)
    manager.register(request, 12)
    assert manager.num_free_blocks == 12
    advance(manager, request, 4)
    assert [block is None for block in manager.table("a")] == [True, True, False, False, False]
    assert manager.num_free_blocks == 13
    assert manager.block_ids(request)[0][:2] == (0, 0)
    manager.free(request)
    assert manager.num_free_blocks == 16


def test_each_group_has_its_own_window() -> None:
    manager = make_manager(FULL, window(6), num_blocks=32)
    request = make_request("a", 13)
    assert compute(manager, request)
    advance(manager, request, 4)
    assert None not in manager.table("a", 0)
    assert manager.table("a", 1)[:2] == (None, None)
    assert not set(manager.table("a", 0)) & set(manager.table("a", 1))


def test_a_window_hit_needs_the_last_window_only() -> None:
    """The request holds no block before it."""
    manager = make_manager(window(5))
    compute_and_leave(manager, make_request("a", list(range(16))))
    probe = make_request("b", [*range(16), 99])
    hit = manager.find_prefix(probe)
    assert hit.num_tokens == 16
    assert [block is None for block in hit.tables[0]] == [True, True, True, False]
    assert compute(manager, probe)
    assert manager.num_free_blocks == 14


def test_a_miss_in_the_window_shortens_the_hit_to_before_it() -> None:
    """With block 2 of 4 gone, hits of 3 and of 4 blocks fail; one of 2 blocks has its window whole."""
    manager = make_manager(window(6), num_blocks=4)
    request = make_request("a", list(range(16)))
    compute_and_leave(manager, request)
    held = manager.pool.find((0, request.block_digests[3]))
    assert held is not None
    manager.pool.touch([held])  # the last block stays, so the next to be handed out is block 2
    manager.pool.allocate(1)
    assert num_hits(manager, [*range(16), 99]) == 8


def test_groups_agree_again_after_one_has_shortened_the_hit() -> None:
    """Block 1 is gone from the small window, block 3 from the large one. The small one takes 4 blocks, the large
    one cuts that to 3 (0 to 2 held); there the small one needs block 2 only, which it has.

    With block 2 gone from the small one too, 3 fails for it after the large one has asked for 3.
    """
    for small_misses, expected in (((1,), 12), ((2,), 8)):
        manager = make_manager(window(3), window(100), num_blocks=16)
        request = make_request("a", list(range(16)))
        assert compute(manager, request)
        manager.register(request, 16)
        names = [(0, request.block_digests[index]) for index in small_misses] + [(1, request.block_digests[3])]
        _forget(manager, request, names)
        assert num_hits(manager, [*range(16), 99]) == expected


def _forget(manager: KVCacheManager, request: Request, names: list[tuple[int, bytes]]) -> None:
    """Let the pool hand out the blocks of these names, and no others, of a request that holds its blocks."""
    kept = [block for table in manager.block_ids(request) for block in table]
    gone = [block for name in names if (block := manager.pool.find(name)) is not None]
    assert len(gone) == len(names)
    manager.pool.touch([block for block in kept if block not in gone])
    manager.free(request)
    manager.pool.allocate(manager.num_free_blocks)


def test_a_chunk_longer_than_the_window_can_be_found_as_a_prefix() -> None:
    """Its first blocks are let go before its step is completed; others still find them."""
    manager = make_manager(FULL, window(4))
    request = make_request("a", list(range(16)))
    assert compute(manager, request)
    request.num_tokens_with_pending += 1
    assert manager.extend(request, 1) is not None  # a step ahead
    assert manager.table("a", 1)[:3] == (None, None, None)
    assert num_hits(manager, [*range(8), 99]) == 8


def test_a_block_that_passed_before_its_tokens_were_known_is_not_named() -> None:
    """A window smaller than the steps in flight: when the token arrives, the block is somebody else's."""
    manager = make_manager(window(1))
    request = make_request("a", [1, 2, 3])
    assert compute(manager, request)
    request.num_computed_tokens, request.num_tokens_with_pending = 4, 5  # two steps in flight
    assert manager.extend(request, 1) is not None
    assert manager.table("a")[0] is None
    request.output_token_ids += [4, 5]
    manager.register(request, 4)
    assert manager.pool.num_named == 0


def test_a_reset_cache_finds_nothing_computed_before() -> None:
    """Nor what a request that holds such blocks adds to them; one that starts afresh can be found."""
    manager = make_manager()
    request = make_request("a", list(range(4)))
    assert compute(manager, request)
    manager.register(request, 4)
    manager.reset_prefix_cache()
    advance(manager, request, 4)
    manager.register(request, 8)
    assert manager.pool.num_named == 0
    manager.free(request)
    compute_and_leave(manager, make_request("b", list(range(4))))
    assert num_hits(manager, [*range(4), 0, 1, 2, 3, 4]) == 4


def test_blocks_needed_sums_the_groups() -> None:
    """A window of 6 with steps of 4 uses at most 9 positions, in 3 blocks at worst."""
    manager = make_manager(FULL, window(6), num_blocks=16, max_step_tokens=4)
    assert manager.blocks_needed(8) == 2 + 2
    assert manager.blocks_needed(48) == 12 + 3
    assert manager.can_ever_fit(52) and not manager.can_ever_fit(53)


STATE, SLOT = KVCacheGroup(is_state=True), KVCacheGroup(is_state=True, keeps_boundaries=False)


def test_a_state_is_kept_at_each_block_boundary() -> None:
    """A request holds the state it continues from; those at the boundaries before are found, and resumed from one."""
    manager = make_manager(FULL, STATE, num_blocks=24)
    request = make_request("a", list(range(10)))
    assert compute(manager, request)
    manager.register(request, 10)
    advance(manager, request, 4)
    first = manager.table("a", 1)
    assert first[:2] == (None, None) and None not in first[2:]
    for length, expected in ((10, 8), (7, 4), (4, 0)):
        hit = manager.find_prefix(make_request(f"b{length}", list(range(length))))
        assert hit.num_tokens == expected
        assert [block is None for block in hit.tables[1]] == [True] * (expected // 4 - 1) + [False] * (expected > 0)
    manager.free(request)
    assert manager.num_free_blocks == 24


@pytest.mark.parametrize("kept", [1, 2])
def test_the_last_states_alone_are_kept(kept: int) -> None:
    """Those of the last boundaries of each request are found, also by a request that resumed from one; tokens stay."""
    manager = make_manager(FULL, STATE, num_blocks=40, cached_states=kept)
    prompt = list(range(18))
    compute_and_leave(manager, make_request("a", prompt))
    for length in range(2, 19):
        boundary = (length - 1) // 4
        assert num_hits(manager, prompt[:length]) == (4 * boundary if boundary > 4 - kept else 0)
    assert manager.pool.num_named == 4 + kept
    longer = [*prompt, *range(20, 28)]
    compute_and_leave(manager, make_request("b", longer))
    assert num_hits(manager, [*longer, 1]) == 24 and num_hits(manager, prompt) == 0
    assert manager.pool.num_named == 6 + kept and manager.num_free_blocks == 40


def test_one_slot_serves_a_request_to_its_end() -> None:
    """Every entry of its table names the slot, new ones as well; preemption gives one block back, once."""
    manager = make_manager(FULL, SLOT, num_blocks=8, enable_prefix_caching=False)
    request = make_request("a", 9)
    assert compute(manager, request)
    (slot,) = {*manager.block_ids(request)[1]}
    assert manager.table("a", 1) == (None, None, slot) and manager.num_free_blocks == 8 - 3 - 1
    request.output_token_ids += range(8)
    extended = manager.extend(request, 8)
    assert extended is not None
    full, added = extended
    assert (added.group, added.start, added.block_ids) == (1, 3, (slot, slot)) and slot not in full.block_ids
    assert manager.table("a", 1) == (None, None, None, None, slot)
    manager.free(request)
    assert manager.num_free_blocks == 8


def test_a_state_costs_a_request_one_block_in_its_slot() -> None:
    """5 blocks of tokens and the slot."""
    manager = make_manager(FULL, SLOT, num_blocks=6, enable_prefix_caching=False)
    assert manager.can_ever_fit(20) and not manager.can_ever_fit(21)
    assert make_manager(FULL, STATE, num_blocks=6, max_step_tokens=1).can_ever_fit(16)
