"""The executor `mp` over several machines: rank 0 is this process, on the first of them."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from piecegraph.errors import ConfigError
from piecegraph.runner.clusters.channel_server import ChannelServer, DistantProcess
from piecegraph.runner.clusters.node import Nodes, announce
from piecegraph.runner.distributed.child_process import Child, start_child
from piecegraph.runner.distributed.executor import WORKER, MpExecutor

if TYPE_CHECKING:
    from piecegraph.runner.common.engine_config import EngineConfig

KEY_BYTES = 32


class NodesExecutor(MpExecutor):
    """The executor of ranks on several machines, those of others started there by `serve_node`.

    Its constructor waits until all machines have come; interrupt it if one does not.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._nodes = Nodes(
            nnodes=config.nnodes,
            node_rank=config.node_rank,
            master_addr=config.master_addr,
            master_port=config.master_port,
        )
        super().__init__(config)

    def _make_store(self) -> str:
        """Host the store at the port that all machines know."""
        from piecegraph.runner.tensor_parallel.process_group import hosted_store

        nodes = self._nodes
        try:
            self._hosted = hosted_store(nodes.master_addr, self._num_ranks, nodes.master_port)
        except RuntimeError as error:  # torch's errors of stores
            raise ConfigError(
                f"master_port={nodes.master_port} cannot be used on this machine: {str(error).splitlines()[0]} Give "
                "another on all machines."
            ) from error
        return nodes.store_address

    def _start_ranks(self, lifeline: int) -> list[Child]:
        """Start the ranks of this machine, and wait for those of the others."""
        own = self._nodes.ranks(self._num_ranks)
        children = [start_child(WORKER, "rank", rank, lifeline, self._timeout_s) for rank in own if rank]
        key = secrets.token_bytes(KEY_BYTES)
        server = ChannelServer(self._nodes.master_addr, key, self._timeout_s)
        try:
            announce(self._hosted, server, key)
            channels = server.accept({rank for rank in range(self._num_ranks) if rank not in own}, lambda: None)
        except BaseException:
            self._processes += children  # `close` ends them
            raise
        finally:
            server.close()
        for rank, (channel, pid) in sorted(channels.items()):
            children.append(Child("rank", rank, _process(channel, pid), channel))
        return children


def _process(channel: Connection, pid: int) -> DistantProcess:
    return DistantProcess(pid, lambda: _end_of(channel), channel.close)


def _end_of(channel: Connection) -> str | None:
    """Return why a rank of another machine is gone, None while its channel is there."""
    if channel.closed:
        return "it was told to end"
    readable, _, _ = select.select([channel], [], [], 0)
    if not readable:
        return None
    with socket.socket(fileno=channel.fileno()) as look:
        try:
            has_ended = look.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            has_ended = True
        finally:
            with contextlib.suppress(OSError):
                look.detach()
    return "its machine has closed the channel" if has_ended else None
