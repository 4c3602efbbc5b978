"""The check of what can sleep on a GPU, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piecegraph.errors import ConfigError
from piecegraph.runner.device_memory.cuda_memory import unavailable_reason

if TYPE_CHECKING:
    import torch

    from piecegraph.runner.common.engine_config import EngineConfig


def check_sleep_mode(config: EngineConfig, device: torch.device) -> None:
    """Raise `ConfigError` if an engine with this config could not give its memory on `device` back.

    What cannot sleep on any device is refused by `EngineConfig` itself.
    """
    if not config.enable_sleep_mode or device.type == "cpu":
        return
    for is_given, what in (
        (config.speculative is not None, "speculative_config on a GPU"),
        (config.enable_lora, "enable_lora on a GPU"),
    ):
        if is_given:
            raise ConfigError(f"enable_sleep_mode=True is not yet available with {what}; leave it out.")
    reason = unavailable_reason(device)
    if reason:
        raise ConfigError(f"enable_sleep_mode=True is not available on {device}, because {reason}; leave it out.")
