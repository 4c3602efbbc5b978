"""The choice among executors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piecegraph.errors import ConfigError
from piecegraph.runner.distributed.executor import MpExecutor, UniProcExecutor
from piecegraph.runner.distributed.external_launcher import ExternalLauncherExecutor

if TYPE_CHECKING:
    from piecegraph.runner.common.engine_config import EngineConfig
    from piecegraph.runner.distributed.protocol import Executor
    from piecegraph.runner.tensor_parallel.engine_peers import EnginePeers


def make_executor(config: EngineConfig, peers: EnginePeers | None = None) -> Executor:
    """Return the executor that the config asks for. Raises `ConfigError`.

    `peers`: the engines that share experts with this one, in processes of this machine.
    """
    if peers is not None:
        return MpExecutor(config, peers)
    if config.distributed_executor_backend == "uniproc":
        return UniProcExecutor()
    if config.distributed_executor_backend == "mp" and config.nnodes > 1:
        from piecegraph.runner.clusters.nodes_executor import NodesExecutor

        return NodesExecutor(config)
    if config.distributed_executor_backend == "mp":
        return MpExecutor(config)
    if config.distributed_executor_backend == "external_launcher":
        return ExternalLauncherExecutor(config)
    if config.distributed_executor_backend == "ray":
        from piecegraph.runner.clusters.ray_executor import RayExecutor

        return RayExecutor(config)
    raise ConfigError(f"distributed_executor_backend={config.distributed_executor_backend!r} is not available here.")
