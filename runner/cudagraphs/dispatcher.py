"""The dispatcher: for each batch it looks up the highest mode (FULL > PIECEWISE > NONE) that has a graph for it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from piecegraph.compiler.graphs.batch_descriptor import BatchDescriptor
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.runner.cudagraphs.policy import ResolvedMode

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE

Agree = Callable[[CUDAGraphMode, int], tuple[CUDAGraphMode, int]]
"""A function by which engines that share experts agree. It takes the (mode, padded num_tokens) that this one proposes,
and returns those that it runs: a mode that is not higher, and a padding that is not smaller and that of all engines."""

MODE_RANK = {NONE: 0, PIECEWISE: 1, FULL: 2}
"""The modes, each with a higher number than the modes below it."""


class Dispatched(NamedTuple):
    """A batch's mode and the descriptor that it is padded to. Under NONE the batch is not padded."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    reason: str | None  # why the mode is lower than the one resolved for such batches; None: it is not
    is_cheaper: bool = False  # it was measured to be cheaper than the graph of the resolved mode


class Dispatcher:
    """Immutable tables of the captured descriptors, in which batches are looked up. It needs no GPU."""

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

        `full` and `piecewise`: the captured descriptors of each mode. `resolved`: the modes that batches are meant to
        run under. `failed`: the buckets that could not be captured, with reasons. `static_sizes`: numbers of tokens
        that run faster because pieces were compiled for them with static shapes. A batch is padded to the next of these
        sizes if that is at most twice the smallest bucket that holds the batch (docs/decisions/001-static-sizes.md).
        """
        self.resolved = resolved
        self._failed = dict(failed or {})
        full, piecewise = tuple(full), tuple(piecewise)
        # Tables of uniform FULL graphs by (tokens per request, active LoRAs); all other tables by active LoRAs.
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

        `uniform_token_count`: the number of tokens of each request if all are equal, else None. The batch counts as a
        decode batch if that number is 1, or if FULL graphs were captured for it. `num_active_loras`: as in
        `BatchDescriptor`. `agree`: None for a single rank. `at_most` forbids higher modes.
        """
        wanted = self.resolved.mixed_mode
        is_decode = uniform_token_count == 1 or (uniform_token_count, num_active_loras) in self._uniform
        if is_decode:
            wanted = self.resolved.decode_mode
        found = self._find(num_tokens, num_reqs, uniform_token_count, num_active_loras, at_most)
        if agree is not None:
            proposed = found.descriptor.num_tokens
            if found.mode is NONE:  # others may have a graph for their batch, which this padding lets them use
                proposed = self._padded(proposed, num_active_loras)
            mode, padded = agree(found.mode, proposed)
            if (mode, padded) != (found.mode, found.descriptor.num_tokens):
                assert MODE_RANK[mode] <= MODE_RANK[found.mode] and padded >= found.descriptor.num_tokens, (
                    mode,
                    padded,
                )
                found = self._agreed(mode, padded, num_reqs, uniform_token_count, num_active_loras, found)
        if found.mode is wanted or MODE_RANK[found.mode] >= MODE_RANK[wanted]:
            return found if found.reason is None else found._replace(reason=None)
        if found.reason is not None:
            return found
        if MODE_RANK[at_most] < MODE_RANK[wanted] and found.mode is at_most:
            return found._replace(reason=f"no mode above {at_most.value} was allowed for this batch")
        return found._replace(reason=self._why_not(wanted, num_tokens, num_reqs, num_active_loras, uniform_token_count))

    def padded_to(self, padded: int, *, num_reqs: int, uniform_token_count: int | None) -> Dispatched:
        """Return the highest mode with a graph of exactly `padded` tokens, for a batch of no more; else NONE."""
        num_reqs = max(num_reqs, 1)  # a descriptor has one at least
        found = self._find(padded, num_reqs, uniform_token_count, 0, FULL)
        if found.descriptor.num_tokens == padded:
            return found
        return Dispatched(NONE, _unpadded(padded, num_reqs, None, 0), f"no graph of {padded} tokens was captured")

    def _padded(self, num_tokens: int, loras: int) -> int:
        """Return the smallest captured size that holds a batch of any requests, `num_tokens` if there is none."""
        tables = [table for table in (self._mixed.get(loras), self._piecewise.get(loras)) if table is not None]
        return min((size for table in tables for size in table.sizes if size >= num_tokens), default=num_tokens)

    def _find(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform_token_count: int | None,
        loras: int,
        at_most: CUDAGraphMode,
    ) -> Dispatched:
        """Return the highest mode, `at_most` at the most, with a graph that holds the batch; without a reason."""
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
        """Return what this engine runs after `agree`: its highest mode with a graph of that padding, else NONE."""
        found = self._find(padded, num_reqs, uniform_token_count, loras, mode)
        reason = (
            f"engines agreed on {padded} tokens; this one proposed {proposed.mode.value} with "
            f"{proposed.descriptor.num_tokens}"
        )
        if found.mode is NONE or found.descriptor.num_tokens != padded:
            return Dispatched(NONE, _unpadded(padded, num_reqs, None, loras), f"{reason}, and has no such graph")
        return found._replace(reason=reason)

    def _why_not(
        self, wanted: CUDAGraphMode, num_tokens: int, num_reqs: int, loras: int, uniform_token_count: int | None
    ) -> str:
        """Return why a batch does not run under `wanted`: a failed capture, or no captured graph that holds it."""
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
            with_loras = f" with {loras} active LoRAs" if loras else ""
            return f"no {wanted.value} graph was captured for such batches{with_loras}"
        if num_tokens > largest:
            return f"{num_tokens} tokens are above the largest captured size {largest} ({wanted.value})"
        return f"no {wanted.value} graph holds {num_reqs} requests in {num_tokens} tokens"


def uniform_token_count(query_lens: Sequence[int]) -> int | None:
    """Return the number of tokens of each request if all are equal, else None."""
    first = query_lens[0]
    return first if query_lens.count(first) == len(query_lens) else None


class _Table:
    """The descriptors of one mode for one kind of batch, at least one, in ascending order of `num_tokens`."""

    __slots__ = ("_found", "_preferred", "sizes")

    def __init__(
        self, mode: CUDAGraphMode, descriptors: Sequence[BatchDescriptor], static_sizes: Collection[int]
    ) -> None:
        ordered = sorted(descriptors, key=lambda descriptor: descriptor.num_tokens)
        self.sizes = [descriptor.num_tokens for descriptor in ordered]
        self._found = [
            Dispatched(mode, descriptor, None) for descriptor in ordered
        ]  # made here, so that no step has to
        static_indices = [i for i, size in enumerate(self.sizes) if size in static_sizes]
        self._preferred = [_preferred_index(size, static_indices, self.sizes) for size in self.sizes]

    def smallest(self, num_tokens: int, num_reqs: int) -> Dispatched | None:
        """Return the smallest entry that holds the batch, or a static one not much larger; None if none holds it."""
        for i in range(bisect_left(self.sizes, num_tokens), len(self.sizes)):
            found = self._found[i]
            max_reqs = found.descriptor.num_reqs
            if max_reqs is None or max_reqs >= num_reqs:
                preferred = self._found[self._preferred[i]]
                max_reqs = preferred.descriptor.num_reqs
                return preferred if max_reqs is None or max_reqs >= num_reqs else found
        return None


def _preferred_index(size: int, static_indices: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the index in `sizes` of the next static size between `size` and twice `size`, else of `size` itself."""
    at = bisect_left(sizes, size)
    return next((i for i in static_indices if i >= at and sizes[i] <= 2 * size), at)


def _by_loras(
    mode: CUDAGraphMode, descriptors: Sequence[BatchDescriptor], static_sizes: Collection[int]
) -> dict[int, _Table]:
    """Return a table for each number of active LoRAs."""
    return {
        loras: _Table(mode, [each for each in descriptors if each.num_active_loras == loras], static_sizes)
        for loras in {descriptor.num_active_loras for descriptor in descriptors}
    }


def _unpadded(num_tokens: int, num_reqs: int, uniform_token_count: int | None, loras: int) -> BatchDescriptor:
    return BatchDescriptor(
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        uniform_token_count=uniform_token_count,
        num_active_loras=loras,
    )
