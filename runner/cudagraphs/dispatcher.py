"""The choice of a batch's mode (FULL if possible, else PIECEWISE, else NONE), by tables of the captured graphs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.cudagraphs.policy import ResolvedMode

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE

Agree = Callable[[CUDAGraphMode, int], tuple[CUDAGraphMode, int]]
"""A function by which data-parallel ranks agree: from the (mode, padded num_tokens) that this rank proposes to those
that all ranks run, a mode no higher and a padding no smaller."""

_RANK = {NONE: 0, PIECEWISE: 1, FULL: 2}


class Dispatched(NamedTuple):
    """A batch's mode and the descriptor that it is padded to; for NONE the batch's own, without padding."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    reason: str | None  # why the mode differs from the one resolved for such batches; None: it does not


class Dispatcher:
    """An immutable table of captured graphs in which batches are looked up; it needs no GPU."""

    def __init__(
        self,
        *,
        full: Iterable[BatchDescriptor],
        piecewise: Iterable[BatchDescriptor],
        resolved: ResolvedMode,
        failed: Mapping[tuple[CUDAGraphMode, BatchDescriptor], str] | None = None,
        static_sizes: Collection[int] = (),
    ) -> None:
        """Make the tables.

        `failed`: the buckets that could not be captured, with reasons. `static_sizes`: numbers of tokens that run
        faster than their neighbours because they were compiled with static shapes; a batch is padded to one of them
        if it is at most twice the closest bucket.

        Measured (H200, Qwen3-0.6B shape): everything but attention takes 1.4 ms in a decode step of 64, 128 or 256
        tokens with static pieces, and 1.7 ms with dynamic ones.
        """
        self.resolved = resolved
        self._failed = dict(failed or {})
        full, piecewise = tuple(full), tuple(piecewise)
        # FULL graphs of uniform decode by (tokens per request, LoRAs); all other graphs by LoRAs
        self._uniform = {
            (tokens, loras): _Table(
                FULL,
                [d for d in full if (d.uniform_token_count, d.num_active_loras) == (tokens, loras)],
                static_sizes,
            )
            for tokens, loras in {(d.uniform_token_count, d.num_active_loras) for d in full}
            if tokens is not None
        }
        self._mixed = _by_loras(FULL, [d for d in full if d.uniform_token_count is None], static_sizes)
        self._piecewise = _by_loras(PIECEWISE, piecewise, static_sizes)

    def dispatch(
        self,
        *,
        num_tokens: int,
        num_reqs: int,
        uniform_token_count: int | None,
        num_active_loras: int = 0,
        agree: Agree | None = None,
        at_most: CUDAGraphMode = FULL,
    ) -> Dispatched:
        """Return the mode of a batch and the smallest captured descriptor that holds it.

        A descriptor of a static size, up to twice as large, is preferred (`static_sizes`).

        `uniform_token_count`: the number of tokens of each request if all are equal and the batch is a decode batch.
        `at_most` forbids higher modes.
        """
        wanted = self.resolved.mixed_mode
        is_decode = uniform_token_count == 1 or (uniform_token_count, num_active_loras) in self._uniform
        if is_decode:
            wanted = self.resolved.decode_mode
        found = self._find(num_tokens, num_reqs, uniform_token_count, num_active_loras, at_most)
        if agree is not None:
            mode, padded = agree(found.mode, found.descriptor.num_tokens)
            if (mode, padded) != (found.mode, found.descriptor.num_tokens):
                assert _RANK[mode] <= _RANK[found.mode] and padded >= found.descriptor.num_tokens, (mode, padded)
                found = self._agreed(mode, padded, num_reqs, uniform_token_count, num_active_loras, found)
        if found.mode is wanted or _RANK[found.mode] >= _RANK[wanted]:
            return found if found.reason is None else found._replace(reason=None)
        if found.reason is not None:
            return found
        if _RANK[at_most] < _RANK[wanted] and found.mode is at_most:
            return found._replace(reason=f"no mode above {at_most.value} was allowed for this batch")
        return found._replace(reason=self._why_not(wanted, num_tokens, num_reqs, num_active_loras, uniform_token_count))

    def _find(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform_token_count: int | None,
        loras: int,
        at_most: CUDAGraphMode,
    ) -> Dispatched:
        if at_most is FULL:
            if uniform_token_count is not None:
                table = self._uniform.get((uniform_token_count, loras))
                if table is not None and (found := table.smallest(num_tokens, num_reqs)) is not None:
                    return found
            table = self._mixed.get(loras)
            if table is not None and (found := table.smallest(num_tokens, num_reqs)) is not None:
                return found
        if at_most is not NONE:
            table = self._piecewise.get(loras)
            if table is not None and (found := table.smallest(num_tokens, num_reqs)) is not None:
                return found
        return Dispatched(NONE, _unpadded(num_tokens, num_reqs, uniform_token_count, loras), None)

    def _agreed(
        self,
        mode: CUDAGraphMode,
        padded: int,
        num_reqs: int,
        uniform_token_count: int | None,
        loras: int,
        proposed: Dispatched,
    ) -> Dispatched:
        found = self._find(padded, num_reqs, uniform_token_count, loras, mode)
        reason = f"ranks agreed on {mode.value} with {padded} tokens; this one proposed {proposed.mode.value}"
        if found.mode is not mode or found.descriptor.num_tokens != padded:
            return Dispatched(NONE, _unpadded(padded, num_reqs, None, loras), f"{reason}, and has no such graph")
        return found._replace(reason=reason)

    def _why_not(
        self, wanted: CUDAGraphMode, num_tokens: int, num_reqs: int, loras: int, uniform_token_count: int | None
    ) -> str:
        if wanted is FULL:
            tables = [self._uniform.get((uniform_token_count or 0, loras)), self._mixed.get(loras)]
        else:
            tables = [self._piecewise.get(loras)]
        failed = [
            (descriptor.num_tokens, reason)
            for (mode, descriptor), reason in self._failed.items()
            if mode is wanted
            and descriptor.num_tokens >= num_tokens
            and (descriptor.num_reqs is None or descriptor.num_reqs >= num_reqs)
            and descriptor.uniform_token_count in (None, uniform_token_count)
            and descriptor.num_active_loras == loras
        ]
        if failed:
            size, reason = min(failed)
            return f"capturing {wanted.value} for {size} tokens failed: {reason}"
        largest = max((table.sizes[-1] for table in tables if table is not None), default=None)
        if largest is None:
            of = f" with {loras} active LoRAs" if loras else ""
            return f"no {wanted.value} graph was captured for such batches{of}"
        if num_tokens > largest:
            return f"{num_tokens} tokens are above the largest captured size {largest} ({wanted.value})"
        return f"no {wanted.value} graph holds {num_reqs} requests in {num_tokens} tokens"


def uniform_token_count(query_lens: Sequence[int]) -> int | None:
    """Return the number of tokens of each request if all are equal, else None."""
    first = query_lens[0]
    return first if query_lens.count(first) == len(query_lens) else None


class _Table:
    """The descriptors of one mode for one kind of batch, at least one, in ascending order."""

    __slots__ = ("_found", "_static", "sizes")

    def __init__(
        self, mode: CUDAGraphMode, descriptors: Sequence[BatchDescriptor], static_sizes: Collection[int]
    ) -> None:
        ordered = sorted(descriptors, key=lambda descriptor: descriptor.num_tokens)
        self.sizes = [descriptor.num_tokens for descriptor in ordered]
        self._found = [Dispatched(mode, descriptor, None) for descriptor in ordered]  # so that a step allocates none
        static = [i for i, size in enumerate(self.sizes) if size in static_sizes]
        self._static = [_static_for(size, static, self.sizes) for size in self.sizes]

    def smallest(self, num_tokens: int, num_reqs: int) -> Dispatched | None:
        """Return the smallest entry that holds the batch, or a static one not much larger; None if none holds it."""
        for i in range(bisect_left(self.sizes, num_tokens), len(self.sizes)):
            found = self._found[i]
            holds = found.descriptor.num_reqs
            if holds is None or holds >= num_reqs:
                static = self._found[self._static[i]]
                holds = static.descriptor.num_reqs
                return static if holds is None or holds >= num_reqs else found
        return None


def _static_for(size: int, static: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the index of the bucket to use for bucket `size`: the next static one up to twice as large, or itself."""
    at = bisect_left(sizes, size)
    return next((i for i in static if i >= at and sizes[i] <= 2 * size), at)


def _by_loras(
    mode: CUDAGraphMode, descriptors: Sequence[BatchDescriptor], static_sizes: Collection[int]
) -> dict[int, _Table]:
    return {
        loras: _Table(mode, [one for one in descriptors if one.num_active_loras == loras], static_sizes)
        for loras in {descriptor.num_active_loras for descriptor in descriptors}
    }


def _unpadded(num_tokens: int, num_reqs: int, uniform_token_count: int | None, loras: int) -> BatchDescriptor:
    return BatchDescriptor(
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        uniform_token_count=uniform_token_count,
        num_active_loras=loras,
    )
