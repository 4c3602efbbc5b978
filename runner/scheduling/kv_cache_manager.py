"""The blocks that each request holds, and the prefixes that requests can share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piecegraph.runner.scheduling.block_hash import ROOT_DIGEST, hash_blocks
from piecegraph.runner.scheduling.block_pool import BlockPool
from piecegraph.runner.scheduling.kv_cache_group import KVCacheGroup, blocks_for
from piecegraph.runner.scheduling.request import NEVER, Request
from piecegraph.runner.scheduling.scheduler_output import NewBlocks

UNREAD_BLOCK = 0
"""The entry of a device table for a block before the window: a valid number that attention never reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """A cached prefix that all groups hold. It takes no reference: use it before anything else changes the pool."""

    num_tokens: int  # a multiple of the block size
    tables: tuple[tuple[int | None, ...], ...]  # per group, the prefix's blocks; None: outside the window


@dataclass(slots=True)
class _Holding:
    """The blocks of a request. Tables of all groups are equally long; entries before a window are None."""

    tables: list[list[int | None]]  # per group
    num_passed: list[int]  # per group: leading entries that are None
    num_registered: int  # leading blocks whose contents are named, or were when they were held
    is_shareable: bool = True  # False: the request builds on a prefix from before `reset_prefix_cache`


class KVCacheManager:
    """The blocks of requests, for each group of layers, out of one pool.

    With prefix caching, full blocks of known tokens are named by a chained digest, and can be found after
    their request has released them, until the pool needs them. A released block is free at once, even if a step in
    flight still reads or writes it: its next owner uses it in a later step of the same stream.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        groups: Sequence[KVCacheGroup] = (KVCacheGroup(),),
        enable_prefix_caching: bool = True,
        cached_states: int | None = None,
    ) -> None:
        """`cached_states`: block boundaries of a request whose states can be found, the last ones; None: all."""
        assert groups, "a model without attention needs no KVCacheManager"
        assert not (enable_prefix_caching and any(group.has_one_slot for group in groups)), (
            "states of prefixes are lost"
        )
        self.block_size = block_size  # tokens
        self.groups = tuple(groups)
        self._pool = BlockPool(num_blocks)
        self._max_step_tokens = max_num_batched_tokens
        self._enable_prefix_caching = enable_prefix_caching
        self._cached_states = cached_states
        self._has_windows = any(not group.keeps_all_tokens for group in groups)
        self._num_growing = sum(
            not group.has_one_slot for group in groups
        )  # groups that get a block per block of tokens
        self._holdings: dict[str, _Holding] = {}

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """The number of free blocks, those with cached prefixes included."""
        return self._pool.num_free

    @property
    def pool(self) -> BlockPool:
        """The pool, read-only for callers; blocks are taken and released through the manager."""
        return self._pool

    def table(self, request_id: str, group: int = 0) -> tuple[int | None, ...]:
        """Return a copy of the block table of a request that holds blocks."""
        return tuple(self._holdings[request_id].tables[group])

    def block_ids(self, request: Request) -> tuple[tuple[int, ...], ...]:
        """Return a request's block tables as the device needs them, per group, with UNREAD_BLOCK for None."""
        tables = self._holdings[request.request_id].tables
        return tuple(
            (_slot(table),) * len(table)
            if group.has_one_slot
            else tuple([UNREAD_BLOCK if block is None else block for block in table])
            for group, table in zip(self.groups, tables, strict=True)
        )

    def blocks_needed(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` holds at any one time, over all groups."""
        return sum(self._max_blocks(group, num_tokens) for group in self.groups)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Return True if a request of `num_tokens` in total can run to its end when it is alone."""
        return self.blocks_needed(num_tokens) <= self.num_blocks

    def find_prefix(self, request: Request) -> PrefixHit:
        """Return the longest cached prefix of a request's known tokens that all groups hold.

        The prefix leaves at least one token to compute, since only a computed token has logits.
        """
        tables: tuple[tuple[int | None, ...], ...] = tuple(() for _ in self.groups)
        if not self._enable_prefix_caching or request.wants_prompt_logprobs:  # its logits need every prompt token
            return PrefixHit(num_tokens=0, tables=tables)
        num_blocks = (request.num_tokens - 1) // self.block_size
        self._extend_digests(request, num_blocks)
        # Each group may shorten what the others agreed on; a shorter prefix may miss in a window that the longer had.
        agreed = -1
        while agreed != num_blocks:
            agreed = num_blocks
            for number, group in enumerate(self.groups):
                num_blocks = self._num_hits(number, group, request.block_digests, num_blocks)
        num_tokens = num_blocks * self.block_size
        if num_blocks:
            tables = tuple(
                tuple(
                    None if index < passed else self._pool.find((number, request.block_digests[index]))
                    for index in range(num_blocks)
                )
                for number, passed in enumerate(self._passed(num_tokens))
            )
        return PrefixHit(num_tokens=num_tokens, tables=tables)

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, *, num_spared_blocks: int = 0) -> bool:
        """Give `request`, which holds no block, the blocks of `hit` and of `num_tokens` more.

        Returns False and changes nothing unless all its known tokens fit now and leave `num_spared_blocks` free.
        """
        assert request.request_id not in self._holdings, f"{request.request_id!r} holds blocks already"
        num_hit_blocks = hit.num_tokens // self.block_size
        num_new_blocks = blocks_for(hit.num_tokens + num_tokens, self.block_size) - num_hit_blocks
        all_blocks = blocks_for(request.num_tokens, self.block_size)
        num_free_needed = 0  # for all known tokens; this call takes as many or fewer
        for group, table in zip(self.groups, hit.tables, strict=True):
            kept = [block for block in table if block is not None]
            num_shared = sum(not self._pool.is_free(block) for block in kept)
            at_once = min(len(kept) + all_blocks - num_hit_blocks, self._max_blocks(group, request.num_tokens))
            num_free_needed += at_once - num_shared
        if num_free_needed + num_spared_blocks > self._pool.num_free:
            return False
        for table in hit.tables:
            self._pool.touch([block for block in table if block is not None])
        self._holdings[request.request_id] = _Holding(
            tables=[
                [*table, *self._new_blocks(group, num_new_blocks)]
                for group, table in zip(self.groups, hit.tables, strict=True)
            ],
            num_passed=self._passed(hit.num_tokens),
            num_registered=num_hit_blocks,
        )
        request.num_slots = (num_hit_blocks + num_new_blocks) * self.block_size
        request.next_registration = (num_hit_blocks + 1) * self.block_size if self._enable_prefix_caching else NEVER
        return True

    def extend(self, request: Request, num_tokens: int) -> list[NewBlocks] | None:
        """Allocate blocks for `num_tokens` after a request's computed tokens.

        Returns the blocks that were added to its tables, or None if too few are free. Blocks before its windows are
        released first, in either case. A group with one slot gets no block: the slot is named again.
        """
        holding = self._holdings[request.request_id]
        if self._has_windows:
            self._release_passed(request, holding)
        start = len(holding.tables[0])
        count = blocks_for(request.num_computed_tokens + num_tokens, self.block_size) - start
        if count * self._num_growing > self._pool.num_free:
            return None
        added = []
        for group, table in enumerate(holding.tables):
            if self.groups[group].has_one_slot:
                slot = _slot(table)
                table[start - 1 :] = [*[None] * count, slot]
                blocks = [slot] * count
            else:
                blocks = self._pool.allocate(count)
                table += blocks
            added.append(NewBlocks(request_id=request.request_id, group=group, start=start, block_ids=tuple(blocks)))
        request.num_slots = (start + count) * self.block_size
        return added

    def extend_each(self, requests: Sequence[Request]) -> list[NewBlocks] | None:
        """Allocate a block in each group for every one of `requests`, whose blocks are full and which compute a token.

        Returns the blocks that were added to their tables. If too few are free, changes nothing and returns None.
        """
        if len(requests) * len(self.groups) > self._pool.num_free:
            return None
        if self._has_windows:  # a block that one request releases may go to the next
            return [added for request in requests for added in self.extend(request, 1) or ()]
        blocks = self._pool.allocate(len(requests) * len(self.groups))
        blocks.reverse()
        added = []
        holdings, block_size, make = self._holdings, self.block_size, tuple.__new__  # faster than NewBlocks(...)
        for request in requests:
            request_id = request.request_id
            tables = holdings[request_id].tables
            start = len(tables[0])
            for group, table in enumerate(tables):
                block = blocks.pop()
                table.append(block)
                added.append(make(NewBlocks, (request_id, group, start, (block,))))
            request.num_slots = (start + 1) * block_size
        return added

    def register(self, request: Request, num_tokens: int) -> None:
        """Name the full blocks of a request's first `num_tokens`, so that other requests can find them.

        These tokens are known, and their computation is scheduled in this step at the latest.
        """
        if num_tokens < request.next_registration:
            return
        holding = self._holdings[request.request_id]
        if not holding.is_shareable:
            request.next_registration = NEVER
            return
        num_blocks = num_tokens // self.block_size
        self._extend_digests(request, num_blocks)
        for group, table in enumerate(holding.tables):
            for index in range(max(holding.num_registered, holding.num_passed[group]), num_blocks):
                block = table[index]
                assert block is not None, f"block {index} of {request.request_id!r} is gone, its window is not"
                self._pool.register(block, (group, request.block_digests[index]))
        if self._cached_states is not None:
            self._forget_states(request, holding.num_registered, num_blocks, self._cached_states)
        holding.num_registered = num_blocks
        request.next_registration = (num_blocks + 1) * self.block_size

    def _forget_states(self, request: Request, num_registered: int, num_blocks: int, kept: int) -> None:
        """Forget the states of all boundaries but the last `kept`, now that there are `num_blocks` named ones."""
        for group, each in enumerate(self.groups):
            for index in range(max(0, num_registered - kept), num_blocks - kept) if each.is_state else ():
                self._pool.forget((group, request.block_digests[index]))

    def free(self, request: Request) -> None:
        """Release all blocks of a request, the last first, so that the prefix others may share is reused last."""
        holding = self._holdings.pop(request.request_id)
        request.num_slots = 0
        request.next_registration = NEVER
        self._pool.release(_tail_first(holding.tables))

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes computed so far, and share none that a request now holding blocks computes: its
        blocks build on the forgotten ones.
        """
        self._pool.forget_names()
        for holding in self._holdings.values():
            holding.is_shareable = False

    def start_over(self) -> None:
        """Release all blocks and forget all prefixes, whatever state an interrupted call has left."""
        self._pool = BlockPool(self._pool.num_blocks)
        self._holdings = {}

    def _max_blocks(self, group: KVCacheGroup, num_tokens: int) -> int:
        return group.max_blocks(num_tokens, self.block_size, self._max_step_tokens)

    def _passed(self, num_computed_tokens: int) -> list[int]:
        return [
            0 if group.has_one_slot else group.num_passed_blocks(num_computed_tokens, self.block_size)
            for group in self.groups
        ]

    def _new_blocks(self, group: KVCacheGroup, count: int) -> list[int | None]:
        """Return the entries of a new request's table for its next `count` blocks, one or more."""
        if not group.has_one_slot:
            return [*self._pool.allocate(count)]
        return [*[None] * (count - 1), *self._pool.allocate(1)]

    def _num_hits(self, number: int, group: KVCacheGroup, digests: Sequence[bytes], num_blocks: int) -> int:
        """Return the blocks of the longest prefix, `num_blocks` at most, from which this group can continue."""
        find = self._pool.find
        if group.keeps_all_tokens:
            for index in range(num_blocks):
                if find((number, digests[index])) is None:
                    return index
            return num_blocks
        # From the end: a miss rules out every prefix whose window reaches over it.
        index = num_blocks - 1
        while index >= group.num_passed_blocks(num_blocks * self.block_size, self.block_size):
            if find((number, digests[index])) is None:
                num_blocks = index
            index -= 1
        return num_blocks

    def _extend_digests(self, request: Request, num_blocks: int) -> None:
        """Compute the digests of a request's first `num_blocks` full blocks, each once in the life of the request."""
        digests = request.block_digests
        assert num_blocks * self.block_size <= request.num_tokens, "a block of tokens that are not all known"
        if len(digests) < num_blocks:
            tokens = request.token_ids(len(digests) * self.block_size, num_blocks * self.block_size)
            parent = digests[-1] if digests else ROOT_DIGEST
            digests += hash_blocks(parent, tokens, self.block_size, request.prefix_salt)

    def _release_passed(self, request: Request, holding: _Holding) -> None:
        num_computed = request.num_computed_tokens - request.num_unverified_tokens
        for group, num_passed in enumerate(self._passed(num_computed)):
            first = holding.num_passed[group]
            if num_passed <= first:
                continue
            if holding.num_registered < num_passed:
                # Their step is scheduled but not completed: a request that finds them runs after it. Without this a
                # chunk longer than the window would leave nothing to find.
                self.register(request, min(num_computed, request.num_tokens))
            table = holding.tables[group]
            blocks = [block for block in table[first:num_passed] if block is not None]
            table[first:num_passed] = [None] * (num_passed - first)
            holding.num_passed[group] = num_passed
            self._pool.release(reversed(blocks))


def _slot(table: Sequence[int | None]) -> int:
    """Return the block of a group with one slot: the last entry."""
    slot = table[-1]
    assert slot is not None, "a request without its slot"
    return slot


def _tail_first(tables: Sequence[Sequence[int | None]]) -> Iterator[int]:
    """Yield all blocks, the highest index of all groups first: a prefix is useful only while all groups hold it."""
    for row in zip(*(reversed(table) for table in tables), strict=True):
        for block in row:
            if block is not None:
                yield block
