"""How one rank of `mp` takes part in an engine, from its number: its stage, its groups and its runner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from piecegraph.runner.distributed.group_runner import (
    GroupRunner,
    LeadingRunner,
    LeadingSpeculativeRunner,
    SpeculativeGroupRunner,
)
from piecegraph.runner.distributed.lockstep_runner import LeadingLockstepRunner, LockstepRunner
from piecegraph.runner.distributed.stage_runner import LeadingStageRunner, StageRunner
from piecegraph.runner.pipeline_parallel.connections import no_check
from piecegraph.runner.pipeline_parallel.stage import Stage
from piecegraph.runner.pipeline_parallel.stage_link import StageLink
from piecegraph.runner.tensor_parallel.engine_peers import Agreement, EnginePeers
from piecegraph.runner.tensor_parallel.parallel import Parallel
from piecegraph.runner.tensor_parallel.process_group import RankGroup, own_address

if TYPE_CHECKING:
    from piecegraph.runner.common.engine_config import EngineConfig
    from piecegraph.runner.distributed.executor import MpExecutor


def rank_parallel(
    config: EngineConfig,
    store: dist.Store,
    rank: int,
    timeout_s: float,
    *,
    leading: MpExecutor | None = None,
    check: Callable[[], None] = no_check,
    peers: EnginePeers | None = None,
) -> Parallel:
    """Return how `rank` takes part. Ranks of one stage follow each other; `leading`: the executor, on rank 0.

    `check` is called while the rank waits for others at start, and may raise. `peers`: the engines that share experts.
    """
    size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    local_rank = rank % (config.num_ranks // config.nnodes)  # each machine has as many
    if peers is not None:
        local_rank += peers.engine * config.num_ranks  # engines see the GPUs of all
    watched: dict[str, Any] = {"check": check, "is_watched": True}
    world = RankGroup(store, rank, config.num_ranks, timeout_s, local_rank=local_rank, **watched)
    lead: dict[str, Any] = {} if leading is None else {"executor": leading}
    if peers is not None:
        return _lockstep_parallel(world, peers, timeout_s, lead, check)
    if num_stages == 1:
        plain: Any = GroupRunner if leading is None else LeadingRunner
        if config.speculative is not None:
            plain = SpeculativeGroupRunner if leading is None else LeadingSpeculativeRunner
        return Parallel(group=world, runner_kind=partial(plain, group=world, **lead))
    stage = Stage(index=rank // size, num_stages=num_stages)
    group = RankGroup(
        dist.PrefixStore(f"stage {stage.index}", store), rank % size, size, timeout_s, local_rank=rank, **watched
    )
    line = dist.PrefixStore(f"line {rank % size}", store)
    link = StageLink(line, stage, timeout_s, address=own_address(store), check=check)
    staged: Any = StageRunner if leading is None else LeadingStageRunner
    return Parallel(
        group=group,
        runner_kind=partial(staged, group=group, link=link, **lead),
        world=world,
        stage=stage,
        connect_others=link.connect,
        take_other_connections=link.take_connections,
    )


def _lockstep_parallel(
    world: RankGroup, peers: EnginePeers, timeout_s: float, lead: dict[str, Any], check: Callable[[], None]
) -> Parallel:
    """Return how a rank takes part in an engine that steps together with others."""
    world.engines = peers.group(f"rank {world.rank}", world.size, timeout_s, check=check)
    agreement = Agreement.of(peers, world.size, check=check) if lead else None

    def connect(device: torch.device) -> None:
        assert world.engines is not None
        world.engines.connect(device)
        if agreement is not None:
            agreement.connect()

    kind: Any = LockstepRunner if agreement is None else partial(LeadingLockstepRunner, agreement=agreement)
    return Parallel(group=world, runner_kind=partial(kind, group=world, **lead), peers=peers, connect_others=connect)
