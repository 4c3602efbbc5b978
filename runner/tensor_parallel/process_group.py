"""The ranks of one model over torch.distributed: gloo between processes of a CPU, NCCL between GPUs.

A group belongs to one engine. It is no default process group and leaves the process's own alone. Ranks of one machine
talk over its loopback address only.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from piecegraph import environment
from piecegraph.errors import ConfigError
from piecegraph.passes.ops.collectives import CollectiveError
from piecegraph.runner.pipeline_parallel.connections import (
    CHECK_S,
    START_TIMEOUT_S,
    connect_in_thread,
    nccl_group,
    no_check,
)
from piecegraph.runner.tensor_parallel.aborting import Closing, attempt, wait_until
from piecegraph.runner.tensor_parallel.symmetric_memory.symmetric_collectives import (
    SymmetricCollectives,
    name_of_collectives,
    why_not_symmetric,
)

ABORT_S = 5.0
"""How long `RankGroup.abort` takes at most."""

CAPTURE_TIMEOUT_S = 300.0
"""How long a collective waits for other ranks while graphs are captured.

Kernels are compiled and tuned at their first run, by one rank or engine a quarter of a minute after another. Ranks that
end or are stopped are noticed by those who started them.
"""


def launched_store(rank: int, num_ranks: int) -> dist.Store:
    """Return the store at which the ranks of a launcher meet, under a name that only one engine has.

    Every rank calls this as often and in the same order, as its program makes engines. torch reads MASTER_ADDR and
    MASTER_PORT; under torchrun the store is that of its agent, else rank 0 starts one.
    """
    store, _, _ = next(iter(dist.rendezvous("env://", rank, num_ranks)))
    number = store.add(f"piecegraph engines of rank {rank}", 1)
    return dist.PrefixStore(f"piecegraph engine {number}", store)


def open_store(address: str, num_ranks: int) -> dist.Store:
    """Return the store at an address: a file of this machine, or `tcp://HOST:PORT`."""
    if not address.startswith("tcp://"):
        return dist.FileStore(address, num_ranks)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    timeout = timedelta(seconds=START_TIMEOUT_S)
    return dist.TCPStore(host, int(port), num_ranks, is_master=False, timeout=timeout, wait_for_workers=False)


def hosted_store(host: str, num_ranks: int, port: int = 0) -> dist.TCPStore:
    """Start a store in this process, which lives as long as the object. `port`: 0 is any that is free."""
    return dist.TCPStore(host, port, num_ranks, is_master=True, wait_for_workers=False)


def own_address(store: dist.Store) -> str:
    """Return the address at which other ranks reach this process: loopback unless the store is on a network."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return "127.0.0.1"
    host = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(host[0], socket.SOCK_DGRAM) as towards:
        towards.connect(host[4])  # sends nothing; it asks for the way
        return str(towards.getsockname()[0])


class RankGroup:
    """One rank's connection to the others: values of all ranks at start, then collectives.

    `connect` comes after `exchange`: it needs all ranks at the same time. A collective that fails raises
    `CollectiveError`; the group cannot be used afterwards.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_s: float,
        *,
        local_rank: int | None = None,
        check: Callable[[], None] = no_check,
        is_watched: bool = False,
        exchanges_tokens: bool = False,
    ) -> None:
        """Store the parts. `check` is called while the rank waits in `exchange`, and may raise.

        `exchanges_tokens`: whether the ranks are of several engines that share experts, one of each.
        `timeout_s`: how long a collective waits for other ranks, but for those of `capturing`.
        `is_watched`: whether rank 0 notices on GPUs that a rank is lost, and ends the others; see `nccl_group`.
        `local_rank`: the rank among those of this machine, and the number of its GPU; None: `rank`.
        """
        self.rank = rank
        self.size = size
        self.local_rank = rank if local_rank is None else local_rank
        self.is_on_gpu = False
        self.engines: RankGroup | None = None  # the ranks of this number in the engines that share experts
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._check = check
        self._is_watched = is_watched
        self._exchanges_tokens = exchanges_tokens
        self._group: Any = None
        self._symmetric: SymmetricCollectives | None = None
        self._aborted: SymmetricCollectives | None = None
        self.sums_note = ""
        """How sums over the ranks, or of shared experts, are made on GPUs, and why; known once connected."""
        self.device = torch.device("cpu")
        """Where the tensors of the ranks are, once they are connected."""

    def exchange(self, name: str, value: str) -> list[str]:
        """Return what each rank gave under `name`, by rank. Waits until all have."""
        self._store.set(f"{name}/{self.rank}", value)
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._store.check(keys):
            self._check()
            if time.monotonic() > deadline:
                raise CollectiveError(f"not all ranks gave their {name} within {START_TIMEOUT_S:g} s.")
            time.sleep(CHECK_S)
        return [self._store.get(key).decode() for key in keys]

    def agree(self, name: str, facts: dict[str, str]) -> None:
        """Raise `ConfigError`, on every rank, if the facts of a rank differ from those of rank 0."""
        own, *others = (json.loads(text) for text in self.exchange(name, json.dumps(facts)))
        for rank, other in enumerate(others, start=1):
            for fact in sorted({*own, *other}):
                if own.get(fact) != other.get(fact):
                    raise ConfigError(
                        f"rank {rank} has another {fact} than rank 0 ({other.get(fact)}, and {own.get(fact)}). All "
                        "ranks of one model need the same software and the same weights."
                    )

    def smallest(self, name: str, value: int) -> int:
        """Return the smallest of all ranks' values."""
        return min(int(each) for each in self.exchange(name, str(value)))

    def connect(self, device: torch.device) -> None:
        """Connect all ranks, which have to call this at about the same time. `device`: where their tensors are.

        An interrupt, or what `check` raises, leaves a thread behind, which ends with its library's wait: after the
        group's timeout over gloo; over NCCL after the store's, at most `START_TIMEOUT_S`.
        """
        self.exchange("connects", "")
        self.is_on_gpu, self.device = device.type == "cuda", device
        connect_in_thread(lambda: self._make_group(device), self._check)
        if self.is_on_gpu and self.size > 1:
            self.sums_note = self._find_symmetric_collectives(device)

    def _make_group(self, device: torch.device) -> None:
        if not self.is_on_gpu:
            self._group = self._gloo_group()
            return
        torch.cuda.set_device(device)  # of this thread
        self._group = nccl_group(self._store, self.rank, self.size, self._timeout, is_watched=self._is_watched)
        self.all_reduce(torch.zeros(1, device=device))  # makes the communicator, which no capture can do
        torch.cuda.synchronize(device)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Let collectives inside this block wait for `CAPTURE_TIMEOUT_S`, those of `engines` included."""
        groups = [group for group in (self, self.engines) if group is not None]
        for group in groups:
            group._set_timeout(max(group._timeout, timedelta(seconds=CAPTURE_TIMEOUT_S)))
        try:
            yield
        finally:
            for group in groups:
                group._set_timeout(group._timeout)

    def _set_timeout(self, timeout: timedelta) -> None:
        group = self._group  # read once: `abort` may take it meanwhile
        if group is not None:
            group._set_default_timeout(timeout)

    def _find_symmetric_collectives(self, device: torch.device) -> str:
        """Set up sums through symmetric memory if all ranks can have them, and return the note about it."""
        what = name_of_collectives(self._exchanges_tokens)
        hosts = self.exchange("host", f"{socket.gethostname()} {_boot_id()}")
        gpus = [int(number) for number in self.exchange("gpu", str(device.index))]
        if environment.read(environment.SYMMETRIC_SUMS) == "0":
            reason = f"{environment.SYMMETRIC_SUMS}=0"
        else:
            reason = why_not_symmetric(hosts, gpus, torch.cuda.device_count(), torch.cuda.can_device_access_peer)
        if reason := next(filter(None, self.exchange("why there is no symmetric memory", reason)), ""):
            return f"{what}: NCCL; {reason}"
        name = self.exchange("name of symmetric memory", f"piecegraph {uuid.uuid4().hex}")[0]
        sums: SymmetricCollectives | None = None
        try:
            sums = SymmetricCollectives(
                self._store, self.rank, self.size, device, name, exchanges_tokens=self._exchanges_tokens
            )
        except RuntimeError as error:
            reason = f"rank {self.rank}: {str(error).partition(chr(10))[0]}"
        reason = next(filter(None, self.exchange("why symmetric memory failed", reason)), "")
        if sums is None or reason:
            return f"{what}: NCCL; {reason}"
        self._symmetric = sums  # before it is measured, so that `abort` ends a kernel that waits for a lost rank
        sums.measure(self.exchange, self._nccl_scatter_sum if self._exchanges_tokens else self._nccl_add_up)
        return sums.describe()

    def _gloo_group(self) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._timeout
        options._devices = [gloo.create_device(hostname=own_address(self._store))]
        return gloo(dist.PrefixStore("gloo", self._store), self.rank, self.size, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks; the bits are equal on all ranks."""
        symmetric = self._symmetric  # read once: `abort` may take it meanwhile
        if symmetric is not None and x.is_contiguous() and symmetric.takes(x):
            output = torch.empty_like(x)
            symmetric.add_up(x, output)
        else:
            output = x.clone(memory_format=torch.contiguous_format)
            self.all_reduce_in_place(output)
        return output

    def all_reduce_in_place(self, x: torch.Tensor) -> None:
        """Replace `x`, which must be contiguous, by the sum over all ranks; the bits are equal on all ranks."""
        symmetric = self._symmetric
        if symmetric is not None and symmetric.takes(x):
            symmetric.add_up(x, x)
        else:
            self._nccl_add_up(x, x)

    def prepare_norm(self, size: int, dtype: torch.dtype) -> None:
        """Compile and try the kernel of a sum of rows of `size` numbers with the residual add and norm behind it.

        It does nothing without symmetric memory. All ranks call this at about the same time, once they are connected.
        If the kernel fails on a rank, NCCL makes all sums.
        """
        symmetric = self._symmetric  # read once: `abort` may take it meanwhile
        if symmetric is not None:
            symmetric.prepare_norm(size, dtype, self.exchange)
            self.sums_note = symmetric.describe()

    def add_up_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return `add_rms_norm(all_reduce(x), residual, weight, eps, offset)`, or None if no kernel does all of it."""
        symmetric = self._symmetric  # read once: `abort` may take it meanwhile
        if symmetric is None or not symmetric.takes_norm(x, residual, weight):
            return None
        return symmetric.add_up_and_norm(x, residual, weight, eps, offset)

    def _nccl_add_up(self, x: torch.Tensor, output: torch.Tensor) -> None:
        assert output is x, "NCCL adds up in place here"
        options = dist.AllreduceOptions()
        options.asyncOp = False  # NCCL then runs it on the current stream
        self._wait(lambda group: group.allreduce([x], options))

    def _nccl_scatter_sum(self, x: torch.Tensor, output: torch.Tensor) -> None:
        options = dist.ReduceScatterOptions()
        options.asyncOp = False
        self._wait(lambda group: group._reduce_scatter_base(output, x, options))

    def _nccl_gather(self, x: torch.Tensor, output: torch.Tensor) -> None:
        options = AllgatherOptions()
        options.asyncOp = False
        self._wait(lambda group: group._allgather_base(output, x, options))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` of all ranks, joined in the last dim."""
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._wait(lambda group: group.allgather([parts], [own]))
        return torch.cat(parts, -1)

    def abort(
        self,
        is_done: Callable[[], bool],
        free_graphs: Callable[[], None] = lambda: None,
        others: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Close, and end the collectives in which this rank's GPU waits for a rank that is lost.

        `free_graphs` destroys the graphs that hold collectives; it is called once `is_done`, and not at all if that
        takes longer than `ABORT_S`. NCCL's abort ends kernels that wait, and then returns only when no graph holds a
        collective of its communicator (`commDestroySync` polls for that), so each connection is closed in a thread of
        its own; one may go on behind this call if something keeps a graph. `others` close connections outside of this
        group, which the GPU may wait in as well.

        Raises nothing for a step that fails: it is logged, and the others are taken.
        """
        deadline = time.monotonic() + ABORT_S
        for group in (self, self.engines):
            if group is not None:
                group._release()
        closing = Closing([*others, *self._take_connections()])
        if wait_until(is_done, deadline):
            attempt(free_graphs, "graphs that hold collectives were not freed")
        closing.wait(deadline)

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of `x` of all engines, one engine's behind the other's; each has as many rows."""
        engines = self._engines
        found = x.new_empty((engines.size * x.shape[0], *x.shape[1:]))
        symmetric = engines._symmetric  # read once: `abort` may take it meanwhile
        if symmetric is not None and symmetric.carries(x):
            symmetric.gather(x.contiguous(), found)
        else:
            engines._nccl_gather(x.contiguous(), found)
        return found

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return this engine's rows of the sum of `x` over the engines; the inverse of `gather_tokens`."""
        engines = self._engines
        own = x.new_empty((x.shape[0] // engines.size, *x.shape[1:]))
        symmetric = engines._symmetric
        if symmetric is not None and symmetric.takes(own):
            symmetric.scatter_sum(x.contiguous(), own)
        else:
            engines._nccl_scatter_sum(x.contiguous(), own)
        return own

    @property
    def _engines(self) -> RankGroup:
        assert self.engines is not None, "experts are divided among the ranks of one engine"
        return self.engines

    def _release(self) -> None:
        """End the kernels of this rank's GPU that wait for a lost rank in symmetric memory."""
        symmetric = self._aborted = self._symmetric or self._aborted  # kept: kernels may still use its memory
        if symmetric is not None:
            attempt(symmetric.release, "kernels that wait for lost ranks were not released")

    def close(self) -> None:
        """Close the connections, which makes collectives of other ranks fail. Idempotent.

        Free the graphs that hold collectives first: see `abort`.
        """
        for close in self._take_connections():
            close()

    def _take_connections(self) -> list[Callable[[], None]]:
        """Return what closes the connections, which are no longer this group's."""
        symmetric, self._symmetric = self._symmetric, None
        group, self._group = self._group, None
        found = [] if symmetric is None else [symmetric.close]
        found += [] if group is None else [group.abort]
        return found + ([] if self.engines is None else self.engines._take_connections())

    def _wait(self, start: Callable[[Any], Any]) -> None:
        """Start a collective of the group, which another thread may close at any time, and wait for it."""
        group = self._group
        if group is None:
            raise CollectiveError("this group of ranks is closed.")
        try:
            work = start(group)
            if work is not None:  # else it runs on the current stream
                work.wait()
        except RuntimeError as error:
            raise CollectiveError(str(error).partition("\n")[0]) from error


def _boot_id() -> str:
    """Return what tells this machine from others of the same name; "" where the system does not say."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
