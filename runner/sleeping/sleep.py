"""Sleep and wake-up: the memory of an engine without requests is given back, and its addresses stay.

Graphs and compiled pieces hold addresses, so they remain valid: nothing is compiled or captured again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from piecegraph.errors import UsageError
from piecegraph.runner.device_memory.host_memory.released_memory import release
from piecegraph.runner.startup.reload_weights import reload_weights

if TYPE_CHECKING:
    from piecegraph.runner.attention.interface.kv_cache import LayerCache
    from piecegraph.runner.startup.load_engine import Loaded

LEVELS = (1, 2)


class Sleep:
    """Whether an engine sleeps, and how deeply."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._level = 0  # 0: awake

    @property
    def is_asleep(self) -> bool:
        """Whether requests are refused until `wake_up`."""
        return self._level > 0

    def sleep(self, level: int) -> int:
        """Give memory back, and return how many bytes.

        Level 1 drops the KV cache, level 2 the weights as well. On a CPU level 1 moves no weights, because they lie in
        host memory already. Raises `UsageError`, with nothing changed, for another level, while requests are
        unfinished, and for what cannot be restored.
        """
        if level not in LEVELS:
            raise UsageError(f"level={level!r}; it must be 1 (drop the KV cache) or 2 (drop the weights as well).")
        loaded = self._loaded
        self._check(level)
        if level <= self._level:
            return 0
        loaded.engine.refuse_requests("the engine sleeps; call wake_up first")
        loaded.engine.reset_prefix_cache()
        step = loaded.runner.step
        caches: list[LayerCache] = [*step.kv_caches.values(), *step.state_caches.values()]
        num_bytes = release(tensor for cache in caches for tensor in cache.tensors)
        if level == 2:
            num_bytes += release(_restorable(loaded.model.model))
        self._level = level
        return num_bytes

    def wake_up(self) -> None:
        """Restore what was dropped, so that requests get the answers that they got before. Idempotent.

        Weights are read again from the model's own files. If that fails, what it raises is raised, and the engine
        sleeps on.
        """
        if self._level == 2:
            reload_weights(self._loaded, None)
        self._level = 0
        self._loaded.engine.refuse_requests("")

    def _check(self, level: int) -> None:
        """Raise `UsageError` if the engine cannot sleep now, or not at this level."""
        loaded = self._loaded
        if loaded.engine.has_unfinished:
            raise UsageError(
                f"{len(loaded.engine.requests)} requests are unfinished; let them finish, or abort them, before sleep."
            )
        if loaded.device.type != "cpu":
            raise UsageError(
                f"sleep is not yet available on {loaded.device.type}; close the LLM and make another, which starts "
                "from the compile cache."
            )
        for is_so, what in (
            (loaded.model.rank_plan is not None or loaded.model.stage is not None, "with several ranks"),
            (level == 2 and loaded.draft is not None, "at level 2 with a model that drafts; use level 1"),
            (level == 2 and loaded.model.adapted is not None, "at level 2 with enable_lora; use level 1"),
        ):
            if is_so:
                raise UsageError(f"sleep is not yet available {what}.")


def _restorable(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield a tensor of each storage of which every byte belongs to a tensor of the module's `state_dict`.

    `reload_weights` writes exactly these tensors.
    """
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in module.state_dict().values():
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    for tensors in by_storage.values():
        if _covered_bytes(tensors) >= tensors[0].untyped_storage().nbytes():
            yield tensors[0]


def _covered_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many bytes of their common storage contiguous tensors cover; 0 if one is not contiguous."""
    spans = []
    for tensor in tensors:
        if not tensor.is_contiguous():
            return 0
        begin = int(tensor.storage_offset()) * tensor.element_size()
        spans.append((begin, begin + tensor.nbytes))
    covered = end = 0
    for begin, last in sorted(spans):
        covered += max(last - max(begin, end), 0)
        end = max(end, last)
    return covered
