"""A machine that is not that of rank 0: it starts its ranks, and passes their messages on.

A node meets rank 0 at the store under `master_addr` and `master_port`, as ranks of torchrun do, and learns there where
channels are accepted and with which key. Whoever reaches that port can be a rank: use it on a network that is trusted.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from piecegraph.errors import ConfigError, WorkerError
from piecegraph.runner.clusters.channel_server import ChannelServer, connect
from piecegraph.runner.common.engine_config import DEFAULT_MASTER_PORT, DISTRIBUTED_TIMEOUT_S
from piecegraph.runner.distributed.child_process import Child, end_all, start_child
from piecegraph.runner.distributed.executor import WORKER

if TYPE_CHECKING:
    import torch.distributed as dist

CLOSE_S = 1.0
"""How long a rank has to end by itself when the channel to rank 0 has ended."""

_CHANNELS = "piecegraph channels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Several machines, and which of them this is."""

    nnodes: int
    node_rank: int
    master_addr: str  # of node 0
    master_port: int

    @property
    def store_address(self) -> str:
        """The address of the store that rank 0 hosts, for `open_store`."""
        return f"tcp://{self.master_addr}:{self.master_port}"

    def ranks(self, num_ranks: int) -> range:
        """Return the ranks of this machine: equally many on each, in the order of machines."""
        per_node = num_ranks // self.nnodes
        return range(self.node_rank * per_node, (self.node_rank + 1) * per_node)


def announce(store: dist.Store, server: ChannelServer, key: bytes) -> None:
    """Tell the other machines where rank 0 accepts channels."""
    store.set(_CHANNELS, json.dumps([server.port, key.hex()]))


def serve_node_as(arguments: Mapping[str, Any]) -> None:
    """Call `serve_node` with those of `LLM`'s arguments that are about machines and ranks, by name.

    Raises `ConfigError` for numbers that do not fit together.
    """
    nodes = Nodes(
        nnodes=arguments.get("nnodes", 1),
        node_rank=arguments["node_rank"],
        master_addr=arguments.get("master_addr", "127.0.0.1"),
        master_port=arguments.get("master_port", DEFAULT_MASTER_PORT),
    )
    num_ranks = arguments.get("tensor_parallel_size", 1)
    if not 0 < nodes.node_rank < nodes.nnodes:
        raise ConfigError(f"node_rank={nodes.node_rank}; it must be from 0 to nnodes - 1, {nodes.nnodes - 1}.")
    if num_ranks % nodes.nnodes:
        raise ConfigError(f"{num_ranks} ranks cannot be divided among nnodes={nodes.nnodes} machines.")
    serve_node(nodes, num_ranks, arguments.get("distributed_timeout_seconds") or DISTRIBUTED_TIMEOUT_S)


def serve_node(nodes: Nodes, num_ranks: int, timeout_s: float) -> None:
    """Run the ranks of this machine until rank 0 ends them.

    Waits for rank 0 at most `START_TIMEOUT_S`. Ranks learn from rank 0 what to load, under the same paths as there.
    Raises `WorkerError` if rank 0 does not come, or a rank ends by itself, which rank 0 is told.
    """
    from piecegraph.runner.tensor_parallel.process_group import open_store

    try:
        store = open_store(nodes.store_address, num_ranks)
        port, key = json.loads(store.get(_CHANNELS))
    except RuntimeError as error:  # torch's errors of stores
        raise WorkerError(
            f"rank 0 was not found at {nodes.store_address}: {str(error).splitlines()[0]}. Start the same command "
            "there with --node-rank 0."
        ) from error
    lifeline, ours = os.pipe()
    children: list[Child] = []
    channels: list[Connection] = []
    try:
        for rank in nodes.ranks(num_ranks):
            children.append(start_child(WORKER, "rank", rank, lifeline, timeout_s))
            pid = children[-1].process.pid
            channels.append(connect(nodes.master_addr, port, bytes.fromhex(key), rank, pid))
        _pass_on(children, channels)
    finally:
        os.close(lifeline)
        end_all(children, ours)
        for channel in channels:
            channel.close()


def _pass_on(children: Sequence[Child], channels: Sequence[Connection]) -> None:
    """Pass messages on in both directions until every rank has ended, or rank 0 has."""
    failures: list[str] = []
    threads = []
    for child, channel in zip(children, channels, strict=True):
        threading.Thread(target=_down, args=(child, channel), daemon=True).start()
        threads.append(threading.Thread(target=_up, args=(child, channel, failures), daemon=True))
        threads[-1].start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.5)  # in parts, so that an interrupt is noticed
    if failures:
        raise WorkerError(failures[0])


def _down(child: Child, channel: Connection) -> None:
    """Pass on what rank 0 says; when rank 0 has ended, or has given up, the rank ends too."""
    with contextlib.suppress(OSError, EOFError):
        while True:
            child.channel.send_bytes(channel.recv_bytes())
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.process.wait(CLOSE_S)
    if child.process.poll() is None:
        child.process.kill()


def _up(child: Child, channel: Connection, failures: list[str]) -> None:
    """Pass on what a rank says, and at last how it ended."""
    with contextlib.suppress(OSError, EOFError):
        while True:
            channel.send_bytes(child.channel.recv_bytes())
    code = child.process.wait()
    if code != 0:
        failures.append(f"{child.name} (process {child.process.pid}) ended with exit code {code}; rank 0 says why.")
    with contextlib.suppress(OSError):
        channel.send(("ended", code))
