"""A device that runs scheduler outputs over a cache of fingerprints, and objects to whatever a real one would
compute wrongly without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from piecegraph.runner.scheduling.kv_cache_group import KVCacheGroup
from piecegraph.runner.scheduling.scheduler_output import AddedRequest, ScheduledRequest, SchedulerOutput

NUM_OUTPUT_TOKENS = 3
"""Draws are from 0 .. 2, so that unlike requests often go on alike."""

Fingerprint = tuple[int, ...]
"""What keys and values at a position depend on: the weights, and all tokens up to it."""


@dataclass
class _Row:
    tokens: list[int]
    num_computed: int
    generation: int
    tables: list[list[int]]


@dataclass
class SimulatedDevice:
    """Runs each step when it is scheduled, as one stream would; who asks for its tokens may do so later."""

    block_size: int
    groups: Sequence[KVCacheGroup]
    num_blocks: int
    generation: int = 0  # of the weights: what requests of an earlier one compute is no use to those added since
    rows: dict[str, _Row] = field(default_factory=dict)
    # Per group; (block, offset) -> what was last written there.
    cache: list[dict[tuple[int, int], Fingerprint]] = field(init=False)
    num_computations: Counter[tuple[str, int]] = field(default_factory=Counter)  # of (request, position)

    def __post_init__(self) -> None:
        self.cache = [{} for _ in self.groups]

    def run(self, output: SchedulerOutput) -> dict[str, int]:
        """Apply `output`; returns the token of each request in `output.sampled`."""
        for request_id in output.removed:
            del self.rows[request_id]  # KeyError: it was not running
        for added in output.added:
            self._add(added)
        for request_id, group, start, block_ids in output.new_blocks:
            table = self.rows[request_id].tables[group]
            assert start == len(table), f"blocks from {start} on, the table ends at {len(table)}"
            table += block_ids
        for item in output.scheduled:  # every write comes before any read: so it is in each layer of a model
            self._write(item)
        for item in output.scheduled:
            self._read(item)
        return {item.request_id: self._sample(item) for item in output.sampled}

    def forget_computations(self, request_id: str) -> None:
        """The next request of that id is another."""
        for key in [key for key in self.num_computations if key[0] == request_id]:
            del self.num_computations[key]

    def _add(self, added: AddedRequest) -> None:
        assert added.request_id not in self.rows, f"{added.request_id!r} is added, but was not removed"
        assert added.num_computed_tokens < len(added.token_ids), "no token left to compute"
        self.rows[added.request_id] = _Row(
            tokens=list(added.token_ids),
            num_computed=added.num_computed_tokens,
            generation=self.generation,
            tables=[list(table) for table in added.block_ids],
        )

    def _slot(self, row: _Row, group: int, position: int) -> tuple[int, int]:
        table = row.tables[group]
        index = position // self.block_size
        assert index < len(table), f"position {position} is outside of a table of {len(table)} blocks"
        assert 0 <= table[index] < self.num_blocks
        return table[index], position % self.block_size

    def _write(self, item: ScheduledRequest) -> None:
        row = self.rows[item.request_id]
        assert item.num_tokens > 0
        assert item.num_computed_tokens == row.num_computed, "a token is left out or computed twice"
        row.num_computed += item.num_tokens
        assert row.num_computed <= len(row.tokens), "more tokens than there are"
        assert item.is_sampled == (row.num_computed == len(row.tokens))
        for position in range(item.num_computed_tokens, row.num_computed):
            self.num_computations[item.request_id, position] += 1
            for group in range(len(self.groups)):
                self.cache[group][self._slot(row, group, position)] = (row.generation, *row.tokens[: position + 1])

    def _read(self, item: ScheduledRequest) -> None:
        """Attend from each computed token to what its window holds."""
        row = self.rows[item.request_id]
        for number, group in enumerate(self.groups):
            window = group.sliding_window
            first = 0 if window is None else max(0, item.num_computed_tokens - window + 1)
            for position in range(first, item.num_computed_tokens + item.num_tokens):
                found = self.cache[number].get(self._slot(row, number, position))
                wanted = (row.generation, *row.tokens[: position + 1])
                assert found == wanted, f"{item.request_id!r} reads {found} at {position} of group {number}: {wanted}"

    def _sample(self, item: ScheduledRequest) -> int:
        row = self.rows[item.request_id]
        token = next_token(row.tokens)
        row.tokens.append(token)
        return token


def next_token(tokens: Sequence[int]) -> int:
    """What the device draws after `tokens`."""
    return (sum(tokens) + len(tokens)) % NUM_OUTPUT_TOKENS
