"""The executor `ray`: ranks are actors on the machines of a Ray cluster, and rank 0 is this process.

Ray decides where ranks run and starts their processes. Messages do not go through Ray: a rank connects to rank 0, as
a rank of `mp` is connected.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from piecegraph.errors import ConfigError
from piecegraph.runner.clusters.channel_server import ChannelServer, DistantProcess, connect
from piecegraph.runner.distributed.child_process import Child
from piecegraph.runner.distributed.executor import MpExecutor

if TYPE_CHECKING:
    import torch

    from piecegraph.runner.common.engine_config import EngineConfig
    from piecegraph.runner.tensor_parallel.parallel import Parallel

PLACE_S = 60.0
"""How long the cluster has to find room for the ranks."""


class RankActor:
    """A rank above 0, as Ray starts it."""

    def where(self) -> int:
        """Return the number of the actor's process."""
        return os.getpid()

    def serve(self, host: str, port: int, key: bytes, rank: int) -> None:
        """Serve rank 0 until it says that all is over, or ends."""
        from piecegraph.runner.distributed.child_program import serve_channel
        from piecegraph.runner.distributed.worker import serve_rank

        os.dup2(2, 1)  # standard output is for answers, and Ray may show what an actor prints
        # The actor's process goes on, since Ray would report its end on the standard output of rank 0.
        serve_channel("rank", rank, connect(host, port, key, rank, os.getpid()), serve_rank)


class RayExecutor(MpExecutor):
    """The executor of ranks on a Ray cluster: the one that this process belongs to, or RAY_ADDRESS names, or a new one.

    Rank 0 is this process. The others are actors in a placement group with a bundle for each, in the order of their
    machines, this one first. Raises `ConfigError` if Ray is not installed or the cluster has no room for the ranks.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config_device = config.device
        self._actors: list[Any] = []
        self._group: Any = None
        self._has_started_ray = False
        super().__init__(config)

    def parallel(self) -> Parallel:
        """Return how rank 0 takes part in the engine. Raises `ConfigError` on a GPU."""
        refuse_gpus(self._config_device)
        return super().parallel()

    def close(self) -> None:
        """End all ranks, and give their room in the cluster back. Idempotent."""
        super().close()
        if self._group is not None:
            import ray

            group, self._group = self._group, None
            with contextlib.suppress(Exception):  # the cluster may have ended
                for actor in self._actors:
                    ray.kill(actor, no_restart=True)
                ray.util.remove_placement_group(group)
                if self._has_started_ray:
                    ray.shutdown()

    def _start_ranks(self, lifeline: int) -> list[Child]:
        """Place and start the actors, and return them once they have connected."""
        ray = _import_ray()
        if not ray.is_initialized():
            ray.init(logging_level="warning", log_to_driver=False)  # it shows logs on standard output
            self._has_started_ray = True
        numbers = list(range(1, self._num_ranks))
        self._group = ray.util.placement_group([{"CPU": 1.0}] * len(numbers), strategy="PACK")  # `close` removes it
        _wait_for_room(ray, self._group, len(numbers))
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        key, host = secrets.token_bytes(32), self._host()
        server = ChannelServer(host, key, self._timeout_s)
        try:
            served = {}
            for rank, bundle in zip(numbers, _ordered_bundles(ray, self._group), strict=True):
                strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
                actor = ray.remote(RankActor).options(num_cpus=1, scheduling_strategy=strategy).remote()
                self._actors.append(actor)
                served[rank] = actor.serve.remote(host, server.port, key, rank)

            def check() -> None:
                for rank, reference in served.items():
                    end = _how_it_ended(ray, reference)
                    if end is not None:
                        raise ConfigError(f"rank {rank} could not be started by Ray: {end}")

            channels = server.accept(set(numbers), check)
        finally:
            server.close()
        return [
            Child("rank", rank, _actor_process(ray, self._actors[rank - 1], served[rank], pid), channel)
            for rank, (channel, pid) in sorted(channels.items())
        ]

    def _make_store(self) -> str:
        """Start the store at which ranks meet, and return its address."""
        from piecegraph.runner.tensor_parallel.process_group import hosted_store

        self._hosted = hosted_store(self._host(), self._num_ranks)
        return f"tcp://{self._hosted.host}:{self._hosted.port}"

    @staticmethod
    def _host() -> str:
        """Return this machine's address in the cluster."""
        return str(_import_ray().util.get_node_ip_address())


def refuse_gpus(device: str | torch.device | None) -> None:
    """Raise `ConfigError` if `device` is a GPU: Ray gives GPUs to actors, and rank 0 is no actor."""
    from piecegraph.runner.models.config.device import resolve_device

    if resolve_device(device).type != "cpu":
        raise ConfigError(
            "distributed_executor_backend='ray' is not yet available on GPUs; give device='cpu', or leave it out: "
            "ranks on the GPUs of one machine need no Ray."
        )


def bundles_by_machine(machines: Mapping[int, str], addresses: Mapping[str, str], first: str) -> list[int]:
    """Return bundles in the order of their machines: `first` comes first, the others by their addresses.

    `machines`: bundle -> machine; `addresses`: machine -> its address. Ranks that are near each other in number are
    then on one machine.
    """
    return sorted(machines, key=lambda bundle: (machines[bundle] != first, addresses[machines[bundle]], bundle))


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "distributed_executor_backend='ray' needs Ray, which is not installed: pip install \"piecegraph[ray]\"."
        ) from error
    return ray


def _wait_for_room(ray: Any, group: Any, num_ranks: int) -> None:
    deadline = time.monotonic() + PLACE_S
    while not group.wait(1):  # a second at a time, so that Ctrl-C ends it; `ready` would start a process for a task
        if time.monotonic() < deadline:
            continue
        has = ray.available_resources().get("CPU", 0.0)
        raise ConfigError(
            f"the Ray cluster has no room for {num_ranks} ranks of one CPU each besides this process ({has:g} CPUs are "
            f"free after {PLACE_S:g} s); add machines, or ask for fewer ranks."
        )


def _ordered_bundles(ray: Any, group: Any) -> Sequence[int]:
    table = ray.util.placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return bundles_by_machine(table, addresses, ray.get_runtime_context().get_node_id())


def _actor_process(ray: Any, actor: Any, served: Any, pid: int) -> DistantProcess:
    return DistantProcess(pid, lambda: _how_it_ended(ray, served), lambda: ray.kill(actor, no_restart=True))


def _how_it_ended(ray: Any, served: Any) -> str | None:
    """Return how an actor's call has ended, in Ray's words; None: it runs."""
    if sys.is_finalizing() or not ray.is_initialized():
        return "the cluster has ended"
    ready, _ = ray.wait([served], timeout=0)
    if not ready:
        return None
    try:
        ray.get(served)
    except ray.exceptions.RayError as error:
        return reason_of_end(str(error))
    return "its call returned"


def reason_of_end(text: str) -> str:
    """Return what Ray's message about an actor says of its end, without its list of possible causes."""
    one_line = " ".join(text.split())
    detail = one_line.rpartition("Worker exit detail: ")[2]
    return detail.partition(" Some common causes")[0].rstrip(".") or "it gave no reason"
