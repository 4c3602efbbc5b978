"""The device of a rank: the CPU, or the GPU with the rank's number among those of its machine."""

from __future__ import annotations

import torch

from piecegraph.errors import ConfigError
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.device_memory.sleep_mode import check_sleep_mode
from piecegraph.runner.models.config.device import resolve_device
from piecegraph.runner.tensor_parallel.parallel import Parallel
from piecegraph.runner.tensor_parallel.process_group import RankGroup


def rank_device(device: str | torch.device | None, group: RankGroup) -> torch.device:
    """Return the device of a rank. A GPU becomes the process's current one.

    Raises `ConfigError` if there are too few GPUs, if `device` names one of them, or if rank 0, which is the user's own
    process, has another current GPU than the first.
    """
    resolved = resolve_device(device) if device is None or not str(device).startswith("cuda:") else None
    if resolved is None:
        raise ConfigError(f"device={str(device)!r} with {group.size} ranks, each of which has its GPU; give 'cuda'.")
    if resolved.type != "cuda":
        return resolved
    if group.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {group.rank} needs GPU {group.local_rank}, and torch sees {torch.cuda.device_count()} here; give "
            "fewer ranks, or device='cpu'."
        )
    if group.local_rank == 0 and torch.cuda.current_device() != 0:
        raise ConfigError(
            f"rank {group.rank} runs on GPU 0, and its process's current GPU is {torch.cuda.current_device()}; show "
            "the process the GPUs that it shall use by CUDA_VISIBLE_DEVICES instead."
        )
    torch.cuda.set_device(group.local_rank)
    return torch.device("cuda", group.local_rank)


def device_of(config: EngineConfig, parallel: Parallel | None) -> torch.device:
    """Return the device of this process. Raises `ConfigError`, also if the engine is to sleep and could not on it."""
    if parallel is None:
        device = resolve_device(config.device)
        check_sleep_mode(config, device)
        return device
    return rank_device(config.device, parallel.group)
