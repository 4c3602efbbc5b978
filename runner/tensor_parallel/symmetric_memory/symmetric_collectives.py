"""Collectives of the GPUs of one host through symmetric memory, which every rank can write in that of the others.

NCCL takes some 15 us for the few kilobytes that a decode step adds up, and nothing overlaps with it. The kernel of
`kernels/pushed.py` takes 3. Up to which size it is faster is measured at the start, and all ranks decide alike. With
more than two ranks that finds, too, from which size on a sum takes less in two steps (`kernels/pushed_twice.py`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist

from piecegraph.runner.tensor_parallel.symmetric_memory.renumbered_store import RenumberedStore

SIZES = tuple(2**power for power in (13, 15, 17, 19, 20, 21))
"""The sizes in bytes that are measured, 8 KiB to 2 MiB."""

CALLS_A_GRAPH = 20
"""How many collectives a measured graph holds, so that its launch is a small part of it."""

REPLAYS = 12
"""How often a measured graph is replayed. The best counts: in many a replay a rank waits for another's launch."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

POLL_S = 0.001
"""How often the first results are asked whether they are there."""

TRIAL_S = 30.0
"""How long the first results may take; a rank may compile its kernels meanwhile."""


class Exchange(Protocol):
    """`RankGroup.exchange`: what each rank gave under a name, by rank."""

    def __call__(self, name: str, value: str) -> list[str]: ...


Sum = Callable[[torch.Tensor, torch.Tensor], object]
"""A function that writes a sum over the ranks, or a rank's part of it, to its second argument."""


GraphTimes = tuple[float, float]
"""Microseconds of a graph of `CALLS_A_GRAPH` sums, and of one of five times as many."""


class Microseconds(NamedTuple):
    """The microseconds of a sum by one push, by two (infinite where that is not measured), and through NCCL."""

    once: float
    twice: float
    nccl: float

    @property
    def pushed(self) -> float:
        """The time of the faster push."""
        return min(self.once, self.twice)


class SymmetricCollectives:
    """An inbox on each rank that the others write, and the size up to which collectives go through it.

    The ranks call the methods at about the same time, as they do those of a process group, and `measure` first. Ranks
    of one model add up (`add_up`); engines that share experts exchange tokens (`gather` and `scatter_sum`).
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, name: str, *, exchanges_tokens: bool
    ) -> None:
        """Allocate the inboxes, and let the ranks write each other's. Raises `RuntimeError` if torch cannot.

        `name`: the same on all ranks, and used once in a process. `exchanges_tokens`: whether the ranks are of engines
        that share experts.
        """
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

        from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.words import Inboxes

        self._name = cast("Any", name)
        store = RenumberedStore(dist.PrefixStore("symmetric memory", store))
        self._named = dist.ProcessGroup(store, rank, size)  # torch looks for its store by name, and keeps no reference
        self._store = store  # whose methods are Python's
        _register_process_group(self._name, self._named)
        _SymmetricMemory.set_group_info(name, rank, size, store)
        capacity = SIZES[-1] // 4
        num_inboxes = 2 if size > 2 and not exchanges_tokens else 1  # one more for sums in two steps
        shape = (num_inboxes, 2, size, capacity)
        strides = (2 * size * capacity, size * capacity, capacity, 1)
        self._inbox = _SymmetricMemory.empty_strided_p2p(shape, strides, torch.int64, device)
        self._handle = _SymmetricMemory.rendezvous(self._inbox, self._name)
        self._inbox.zero_()
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)

        def inboxes(number: int) -> Inboxes:
            offset = number * strides[0] * self._inbox.itemsize
            addresses = [address + offset for address in self._handle.buffer_ptrs]
            return Inboxes.of(addresses, capacity, rank, self._stop, device)

        self._inboxes = inboxes(0)
        self._inboxes_of_twice = inboxes(1) if num_inboxes > 1 else None
        self._rank, self._size, self._device = rank, size, device
        self._exchanges_tokens = exchanges_tokens
        torch.cuda.synchronize(device)
        self._most_bytes = 0
        self._fewest_bytes_of_twice = math.inf
        self._fault = ""
        self._normed: set[tuple[int, torch.dtype]] = set()  # of rows that `prepare_norm` has tried
        self.microseconds: dict[int, Microseconds] = {}
        """The time of a sum by the size of its result in bytes."""

    def measure(self, exchange: Exchange, nccl: Sum) -> None:
        """Choose the size up to which `takes` is true.

        `nccl`: does what `scatter_sum` does if tokens are exchanged, else what `add_up` does.
        """
        exchange("inboxes are clear", "")
        self._fault = next(filter(None, exchange("faults of symmetric memory", self._try())), "")
        if self._fault:
            return
        self.microseconds = self._measured(exchange, nccl)
        self._most_bytes = largest_faster_size(self.microseconds)
        self._fewest_bytes_of_twice = smallest_size_of_twice(self.microseconds)

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether a sum with the result `x` is made through symmetric memory, by its size and dtype alone.

        So all ranks agree.
        """
        return x.dtype in DTYPES and self.carries(x)

    def carries(self, x: torch.Tensor) -> bool:
        """Return whether `x` of each rank is gathered through symmetric memory, by its size alone."""
        return 0 < x.nbytes <= self._most_bytes and x.nbytes % 4 == 0

    def add_up(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """Write the sum of `x` over the ranks to `output`, both contiguous and alike, or the same tensor.

        At most `SIZES[-1]` bytes. The bits are equal on all ranks: they are added in the order of the ranks.
        """
        if x.data_ptr() % 4 or output.data_ptr() % 4:  # a view from an odd number of two bytes on
            aligned = torch.empty_like(x)
            self.add_up(aligned.copy_(x), aligned)
            output.copy_(aligned)
        elif x.nbytes < self._fewest_bytes_of_twice:
            self._add_up_once(x, output)
        else:
            self._add_up_twice(x, output)

    def _add_up_once(self, x: torch.Tensor, output: torch.Tensor) -> None:
        from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.pushed import push_and_add_up

        push_and_add_up(x, output, self._inboxes)

    def _add_up_twice(self, x: torch.Tensor, output: torch.Tensor) -> None:
        from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.pushed_twice import push_twice_and_add_up

        assert self._inboxes_of_twice is not None, "measured with more than two ranks only"
        push_twice_and_add_up(x, output, self._inboxes_of_twice)

    def prepare_norm(self, size: int, dtype: torch.dtype, exchange: Exchange) -> None:
        """Compile and try the kernel of sums with a norm behind them, of rows of `size` numbers.

        All ranks call this after `measure`. `takes_norm` is true of such rows from then on. If the kernel fails on a
        rank, all sums are NCCL's, and `describe` says why.
        """
        from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.pushed_norm import can_norm

        if not self._most_bytes or self._exchanges_tokens or not can_norm(size, dtype):
            return
        self._fault = next(filter(None, exchange("faults of norms behind sums", self._try_norm(size, dtype))), "")
        if self._fault:
            self._most_bytes = 0
        else:
            self._normed.add((size, dtype))

    def takes_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None) -> bool:
        """Return whether a sum of `x`, `[..., size]`, and the norm behind it are one kernel.

        That goes by shapes and dtypes alone, so all ranks agree.
        """
        from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.pushed_norm import MAX_ROWS

        size = x.shape[-1]
        return (
            (size, x.dtype) in self._normed
            and x.numel() <= MAX_ROWS * size
            and residual.shape == x.shape
            and residual.dtype == x.dtype
            and (weight is None or weight.dtype == x.dtype)
            and self.carries(x)
            and x.nbytes < self._fewest_bytes_of_twice
        )

    def add_up_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `add_rms_norm` of the sum of `x` over the ranks: the norm and its input, both new and contiguous.

        `x` and `residual` are `[..., size]` and alike, `takes_norm` is true of them. The bits are equal on all ranks.
        """
        from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.pushed_norm import push_and_norm

        rows, more = (_aligned(each.contiguous()).view(-1, x.shape[-1]) for each in (x, residual))
        factors = None if weight is None else _aligned(weight.contiguous())
        normed, total = push_and_norm(rows, more, factors, eps, offset, self._inboxes)
        return normed.view(x.shape), total.view(x.shape)

    def scatter_sum(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """Write this rank's part of the sum of `x` over the ranks to `output`, a new tensor; both are contiguous.

        `x` has the parts of all ranks, one behind the other, each at most `SIZES[-1]` bytes and whole words of 4 bytes.
        """
        from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.pushed import push_and_scatter_sum

        push_and_scatter_sum(_aligned(x), output, self._inboxes)

    def gather(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """Write `x` of all ranks, one behind the other, to `output`, a new tensor; both are contiguous.

        `x` has at most `SIZES[-1]` bytes, and whole words of 4 bytes.
        """
        from piecegraph.runner.tensor_parallel.symmetric_memory.kernels.pushed import push_and_gather

        push_and_gather(_aligned(x), output, self._inboxes)

    def close(self) -> None:
        """Forget the name of the group. Idempotent."""
        from torch._C._distributed_c10d import _unregister_process_group

        name, self._name = self._name, ""
        if name:
            _unregister_process_group(name)

    def release(self) -> None:
        """Make kernels of this GPU wait for no rank any more, those that wait and all later ones.

        What they compute is worthless. They still use the memory of this object, which must be kept until they end.
        """
        self._stop.fill_(1)

    def describe(self) -> str:
        """Return one line: up to which size, and what sums take beside NCCL."""
        what = name_of_collectives(self._exchanges_tokens)
        if self._fault:
            return f"{what}: NCCL; {self._fault}"
        times = ", ".join(
            f"{size // 1024} KiB {each.pushed:.1f} ({each.nccl:.1f})" for size, each in self.microseconds.items()
        )
        if not self._most_bytes:
            return f"{what}: NCCL; through symmetric memory they take no less, in us (NCCL): {times}"
        until = f"through symmetric memory up to {self._most_bytes // 1024} KiB, else NCCL"
        if self._fewest_bytes_of_twice <= self._most_bytes:
            until += f", in two steps from {self._fewest_bytes_of_twice / 1024:.0f} KiB"
        if self._normed:
            until += ", of few rows in one kernel with the norm behind them"
        return f"{what}: {until}, in us (NCCL): {times}"

    def _try(self) -> str:
        """Return what is wrong with sums of small integers, which are exact in any order, or "".

        There is a sum of each dtype, so that no kernel has to be compiled or loaded later, in a capture or while the
        GPU waits for another rank.
        """
        count = SIZES[-1] // 4
        seeds = [torch.Generator().manual_seed(rank) for rank in range(self._size)]
        parts = torch.stack([torch.randint(-8, 9, (count,), generator=seed) for seed in seeds]).to(self._device)
        results: list[tuple[torch.Tensor, torch.Tensor]] = []  # and what each should be
        for dtype in DTYPES:
            x = parts[self._rank].to(dtype)
            if self._exchanges_tokens:
                short = parts[:, : count - count % (2 * self._size)]  # parts are whole words in 2-byte dtypes, too
                own = x.new_empty(short.shape[1] // self._size)
                self.scatter_sum(x[: short.shape[1]], own)
                results.append((own, short.sum(0).view(self._size, -1)[self._rank]))
            else:
                for add_up in self._ways_to_add_up():
                    added = torch.empty_like(x)
                    add_up(x, added)
                    results.append((added, parts.sum(0)))
        if self._exchanges_tokens:
            words = parts.int()
            gathered = torch.empty_like(words)
            self.gather(words[self._rank], gathered)
            results.append((gathered, words))
        if fault := self._wait_for_all():
            return fault
        is_right = all(torch.equal(x, right.to(x.dtype)) for x, right in results)
        return "" if is_right else f"rank {self._rank} has a wrong sum through symmetric memory"

    def _try_norm(self, size: int, dtype: torch.dtype) -> str:
        """Return what is wrong with sums of small integers and the norm behind them, or "".

        Norms are compared within 2 %, since the other kernel adds squares in another order.
        """
        from piecegraph.passes.ops.rms_norm import add_rms_norm

        seeds = [torch.Generator().manual_seed(rank) for rank in range(self._size + 2)]
        drawn = torch.stack([torch.randint(-8, 9, (2, size), generator=seed) for seed in seeds]).to(self._device, dtype)
        *parts, residual, factors = drawn
        found = self.add_up_and_norm(parts[self._rank], residual, factors[0], 1e-6, 1.0)
        plain = self.add_up_and_norm(parts[self._rank], residual, None, 1e-6, 0.0)
        if fault := self._wait_for_all():
            return fault
        total = sum(parts[1:], parts[0])
        wanted = add_rms_norm(total, residual, factors[0], 1e-6, 1.0), add_rms_norm(total, residual, None, 1e-6, 0.0)
        for (normed, added), (wanted_norm, wanted_sum) in zip((found, plain), wanted, strict=True):
            if not torch.equal(added, wanted_sum) or not torch.allclose(normed, wanted_norm, rtol=0.02, atol=1e-3):
                return f"rank {self._rank} has a wrong norm of a sum through symmetric memory"
        return ""

    def _wait_for_all(self) -> str:
        """Wait until this GPU has done what it was given, and return ""; or end it after `TRIAL_S`, and return why."""
        event = torch.cuda.Event()
        event.record()
        deadline = time.monotonic() + TRIAL_S
        while not event.query():
            if time.monotonic() > deadline:
                self._stop.fill_(1)
                return f"nothing reached rank {self._rank} through symmetric memory within {TRIAL_S:g} s"
            time.sleep(POLL_S)
        return ""

    def _ways_to_add_up(self) -> tuple[Sum, ...]:
        """Return the functions that add up: by one push and, with inboxes for that, by two."""
        return (self._add_up_once,) if self._inboxes_of_twice is None else (self._add_up_once, self._add_up_twice)

    def _measured(self, exchange: Exchange, nccl: Sum) -> dict[int, Microseconds]:
        """Return the microseconds of a sum by size, the same on all ranks."""
        own: dict[str, list[GraphTimes]] = {}
        for size in SIZES:
            x = torch.zeros(size // 2, dtype=torch.bfloat16, device=self._device)
            operands, ways = (x, x), self._ways_to_add_up()
            if self._exchanges_tokens:
                operands, ways = (x.repeat(self._size), x), (self.scatter_sum,)
            own[str(size)] = [_graph_times(partial(way, *operands), self._device) for way in (*ways, nccl)]
        of_ranks = [json.loads(text) for text in exchange("times of sums", json.dumps(own))]
        found = {}
        for name in own:
            once, *twice, other = map(microseconds_of_one, zip(*(each[name] for each in of_ranks), strict=True))
            found[int(name)] = Microseconds(once, twice[0] if twice else math.inf, other)
        return found


def name_of_collectives(exchanges_tokens: bool) -> str:
    """Return what notes of a start call the collectives of a group."""
    return "tokens and sums of shared experts" if exchanges_tokens else "sums over the ranks"


def largest_faster_size(microseconds: Mapping[int, Microseconds]) -> int:
    """Return the largest size up to which pushing is faster than NCCL for every size; 0 if for none."""
    largest = 0
    for size, each in sorted(microseconds.items()):
        if each.pushed >= each.nccl:
            break
        largest = size
    return largest


def smallest_size_of_twice(microseconds: Mapping[int, Microseconds]) -> float:
    """Return the smallest size from which on two pushes are faster than one for every size; infinite if for none."""
    smallest = math.inf
    for size, each in sorted(microseconds.items(), reverse=True):
        if each.twice >= each.once:
            break
        smallest = size
    return smallest


def why_not_symmetric(
    hosts: Sequence[str], gpus: Sequence[int], num_visible: int, can_access: Callable[[int, int], bool]
) -> str:
    """Return why the ranks cannot read each other's memory, or "".

    `hosts`, `gpus`: of each rank, its host and the number of its GPU; `num_visible`: how many GPUs this process sees.
    """
    if len(set(hosts)) > 1:
        return "the ranks are on several hosts"
    if num_visible < len(set(gpus)):
        return f"a rank sees {num_visible} of the {len(set(gpus))} GPUs that the ranks have"
    if len(set(gpus)) < len(gpus):
        return "several ranks see their GPUs under one number"
    pairs = [(one, other) for one in gpus for other in gpus if one != other]
    blind = next((pair for pair in pairs if not can_access(*pair)), None)
    return "" if blind is None else f"GPU {blind[0]} cannot read the memory of GPU {blind[1]}"


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or a copy if it is a view from an odd number of two bytes on."""
    return x.clone() if x.data_ptr() % 4 else x


def microseconds_of_one(of_ranks: Sequence[GraphTimes]) -> float:
    """Return what one sum takes, from the times of each rank: the difference of a long graph and a short one.

    So what a launch takes is not in it. Each time is that of the rank that waited least for others to launch theirs: a
    rank that is late makes all others wait, in one graph longer than in the other.
    """
    short, long = min(short for short, _ in of_ranks), min(long for _, long in of_ranks)
    return (long - short) / (4 * CALLS_A_GRAPH)


def _graph_times(add_up: Callable[[], object], device: torch.device) -> GraphTimes:
    """Return what a short and a long graph of sums take on this rank."""
    add_up()
    torch.cuda.synchronize(device)
    return _microseconds_of_graph(add_up, CALLS_A_GRAPH), _microseconds_of_graph(add_up, 5 * CALLS_A_GRAPH)


def _microseconds_of_graph(add_up: Callable[[], object], count: int) -> float:
    """Return what a replay of a graph of `count` sums takes."""
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(count):
            add_up()
    found: list[float] = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(float(start.elapsed_time(end)) * 1000)
    return min(found[1:])
