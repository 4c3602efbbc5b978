"""Sleep and wake-up: the memory of an engine without requests is given back, and its addresses stay.

Graphs and compiled pieces hold addresses, so they remain valid: nothing is compiled or captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.errors import UsageError
from piecegraph.runner.device_memory.host_memory.released_memory import release
from piecegraph.runner.device_memory.restorable_storages import restorable
from piecegraph.runner.late_start.fast_start import FULL_SPEED
from piecegraph.runner.startup.reload_weights import reload_on_ranks, reload_weights

if TYPE_CHECKING:
    from piecegraph.runner.attention.interface.kv_cache import LayerCache
    from piecegraph.runner.startup.loaded import Loaded

LEVELS = (1, 2)

CallRanks = Callable[[str, Sequence[Any]], list[Any]]
"""Calls a method of `Worker` on every rank, and returns the results by rank."""


def release_on_cpu(loaded: Loaded, level: int) -> int:
    """Give back the memory that a rank on a CPU can do without at `level`, and return how many bytes."""
    step = loaded.runner.step
    caches: list[LayerCache] = [*step.kv_caches.values(), *step.state_caches.values()]
    num_bytes = release(tensor for cache in caches for tensor in cache.tensors)
    return num_bytes + (release(restorable(loaded.model.model)) if level == 2 else 0)


class Sleep:
    """Whether an engine sleeps, and how deeply."""

    def __init__(self, loaded: Loaded, call: CallRanks) -> None:
        """`call`: calls a method of `Worker` on every rank, and returns the results."""
        self._loaded = loaded
        self._call = call
        self._lock = Lock()  # one thread sleeps or wakes up at a time
        self._level = 0  # 0: awake
        self._is_partial = False  # whether a call was cut off, so that some of the memory is there
        self.has_other_weights = False
        """Whether weights were written that the model's own files do not have."""

    @property
    def is_asleep(self) -> bool:
        """Whether requests are refused until `wake_up`."""
        return self._level > 0

    def sleep(self, level: int) -> int:
        """Give memory back, and return how many bytes.

        Level 1 drops the KV cache, and on a GPU moves the weights to host memory, where a CPU has them already. Level 2
        drops both. Raises `UsageError`, with nothing changed, for another level, while requests are unfinished or
        another thread uses the engine, and for what cannot be restored. After any other error, one of too little host
        memory for instance, the engine counts as asleep, and `wake_up` restores it.
        """
        if level not in LEVELS:
            raise UsageError(f"level={level!r}; it must be 1 (drop the KV cache) or 2 (drop the weights as well).")
        with self._lock:
            return self._sleep(level)

    def _sleep(self, level: int) -> int:
        loaded = self._loaded
        self._check(level)
        if level <= self._level and not self._is_partial:
            return 0
        if not self._level:
            loaded.engine.refuse_requests("the engine sleeps; call wake_up first")
        self._level, self._is_partial = max(level, self._level), True
        loaded.engine.reset_prefix_cache()
        if loaded.device.type == "cpu":
            num_bytes = sum(self._call("release_memory", (self._level,)))
        else:
            num_bytes = self._release_on_gpu(self._level)
        self._is_partial = False
        return num_bytes

    def wake_up(self) -> None:
        """Restore what was dropped, so that requests get the answers that they got before. Idempotent.

        After level 2 weights are read again from the model's own files. If that fails, or memory is short
        (`OutOfMemory`), that is raised, and the engine sleeps on; `sleep` then gives back what was restored.
        """
        with self._lock:
            self._wake_up()

    def _wake_up(self) -> None:
        mapped = self._loaded.mapped
        self._is_partial = self._level > 0
        if self._level and mapped is not None:
            mapped.cache.map_again()
            mapped.weights.restore()
        if self._level == 2 and self._loaded.model.is_part:
            reload_on_ranks(self._loaded.engine, self._call, None, None)
        elif self._level == 2:
            reload_weights(self._loaded, None)
        self._level, self._is_partial = 0, False
        self._loaded.engine.take_requests()

    def _release_on_gpu(self, level: int) -> int:
        mapped = self._loaded.mapped
        assert mapped is not None, "checked by `_check`"
        num_bytes = mapped.weights.release(is_reloaded=level == 2) + mapped.cache.unmap()
        torch.cuda.empty_cache()
        return num_bytes

    def _check(self, level: int) -> None:
        """Raise `UsageError` if the engine cannot sleep now, or not at this level."""
        loaded = self._loaded
        if loaded.engine.has_unfinished:
            raise UsageError(
                f"{len(loaded.engine.requests)} requests are unfinished; let them finish, or abort them, before sleep."
            )
        if loaded.device.type != "cpu" and loaded.mapped is None:
            raise UsageError(
                f"on {loaded.device.type} the LLM must be made with enable_sleep_mode=True, so that its memory can be "
                "given back."
            )
        if loaded.start is not None and str(loaded.start.progress) != FULL_SPEED:
            raise UsageError(
                f"the start is not over ({loaded.start.progress}), and what is captured later would use the memory; "
                "call finish_start first."
            )
        for is_so, what in (
            (loaded.model.is_part and loaded.device.type != "cpu", "with several ranks on GPUs"),
            (level == 2 and loaded.draft is not None, "at level 2 with a model that drafts; use level 1"),
            (level == 2 and loaded.model.adapted is not None, "at level 2 with enable_lora; use level 1"),
            (level == 2 and self.has_other_weights, "at level 2 after reload_weights(weights); use level 1"),
        ):
            if is_so:
                raise UsageError(f"sleep is not yet available {what}.")
