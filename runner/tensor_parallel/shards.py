"""Which part of a tensor each rank holds: equal parts of a dim, or whole heads of attention.

Everything here is pure: sizes and ranks in, ranges out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from piecegraph.runner.quantization.methods.shard import Part, Shard


def even_part(full_size: int, rank: int, num_ranks: int, *, start: int = 0) -> Part:
    """Return a rank's range of `full_size` that begin at `start`, in equal parts but for padding at the end."""
    size = -(-full_size // num_ranks)
    begin = min(rank * size, full_size)
    return start + begin, start + min(begin + size, full_size), size


def even_shard(dim: int, full_size: int, rank: int, num_ranks: int, *, packed: int = 1) -> Shard:
    """Return a rank's part of a dim in which `packed` tensors of equal size lie one after the other."""
    assert full_size % packed == 0, f"{full_size} is not {packed} tensors of equal size"
    each = full_size // packed
    parts = tuple(even_part(each, rank, num_ranks, start=index * each) for index in range(packed))
    return Shard(dim=dim, full_size=full_size, parts=parts, step=math.gcd(each, parts[0][2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSplit:
    """How the heads of attention are divided among ranks.

    Each rank has `kv_heads` heads of keys and values, and `group` query heads for each of them. The query heads of one
    KV head may be divided into several such groups, whose KV head is then held by several ranks. Groups that are not
    full, and groups beyond the last, are padded with heads of zeros.
    """

    num_q_heads: int
    num_kv_heads: int
    num_ranks: int
    kv_heads: int
    group: int

    @classmethod
    def of(cls, num_q_heads: int, num_kv_heads: int, num_ranks: int) -> HeadSplit:
        """Return the split with the fewest heads on a rank, and of those the one with the fewest KV heads."""
        full_group = num_q_heads // num_kv_heads
        found = []
        for group in range(1, full_group + 1):
            groups = num_kv_heads * -(-full_group // group)
            kv_heads = -(-groups // num_ranks)
            found.append((kv_heads * group + kv_heads, kv_heads, group))
        _, kv_heads, group = min(found)
        return cls(
            num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, num_ranks=num_ranks, kv_heads=kv_heads, group=group
        )

    @property
    def q_heads(self) -> int:
        """The query heads of a rank, with padding."""
        return self.kv_heads * self.group

    @property
    def padded_q_heads(self) -> int:
        """The query heads of zeros on all ranks together."""
        return self.q_heads * self.num_ranks - self.num_q_heads

    @property
    def kv_copies(self) -> int:
        """The number of ranks' heads, at most, that hold the same KV head."""
        return -(-(self.num_q_heads // self.num_kv_heads) // self.group)

    def _groups(self, rank: int) -> list[tuple[int, int, int]]:
        """Return `(KV head, first query head, end of query heads)` for each of a rank's groups; -1: no KV head."""
        full_group = self.num_q_heads // self.num_kv_heads
        found = []
        for index in range(rank * self.kv_heads, (rank + 1) * self.kv_heads):
            kv_head, part = divmod(index, self.kv_copies)
            if kv_head >= self.num_kv_heads:
                found.append((-1, 0, 0))
                continue
            first = kv_head * full_group
            start = min(part * self.group, full_group)
            found.append((kv_head, first + start, first + min(start + self.group, full_group)))
        return found

    def q_shard(self, dim: int, full_size: int, rank: int) -> Shard:
        """Return a rank's part of a dim that counts query heads, each of the same size."""
        each = full_size // self.num_q_heads
        parts = tuple((start * each, stop * each, self.group * each) for _, start, stop in self._groups(rank))
        step = each * math.gcd(self.group, self.num_q_heads // self.num_kv_heads)
        return Shard(dim=dim, full_size=full_size, parts=parts, step=step)

    def kv_shard(self, dim: int, full_size: int, rank: int) -> Shard:
        """Return a rank's part of a dim that counts KV heads, each of the same size."""
        each = full_size // self.num_kv_heads
        heads = [head for head, _, _ in self._groups(rank)]
        parts = tuple((head * each, (head + 1) * each, each) if head >= 0 else (0, 0, each) for head in heads)
        return Shard(dim=dim, full_size=full_size, parts=parts, step=each)
