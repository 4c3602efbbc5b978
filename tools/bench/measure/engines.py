"""What a bench reads of the engines of an `LLM`, which are in other processes with `data_parallel_size`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from piecegraph.runner.data_parallel.front_door import FrontDoor
from piecegraph.tools.bench.measure.ceilings import Ceilings, measure_ceilings

if TYPE_CHECKING:
    import torch

    from piecegraph.runner.distributed.worker import Worker
    from piecegraph.runner.llm import LLM
    from piecegraph.runner.startup.loaded import Loaded

T = TypeVar("T")
P = ParamSpec("P")

Holder: TypeAlias = "LLM | Loaded"
"""What has an engine in this process: `engine`, `runner`, `compiled`, `hf_config` and `max_model_len`."""


def has_own_engine(llm: LLM) -> bool:
    """Return whether the engine is in this process, and not several in others."""
    return not isinstance(llm.engine, FrontDoor)


def from_engines(llm: LLM, function: Callable[Concatenate[Holder, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
    """Return what `function` returns for each engine, whose first rank it runs on, at the same time for all of them.

    With several engines `function`, its arguments and what it returns go through pickle. It must not raise there: that
    ends the engines.
    """
    if has_own_engine(llm):
        return [function(llm, *args, **kwargs)]
    found = llm.collective_rpc(_on_first_rank, args=(function, args, kwargs))
    return [each[0] for each in found if each is not None]


def _on_first_rank(
    worker: Worker, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[T] | None:
    return None if worker.rank else (function(worker.loaded, *args, **kwargs),)


def measure_engines(llm: LLM) -> Ceilings:
    """Return the best rates of the device of any engine; all engines measure theirs at the same time."""
    found = from_engines(llm, _ceilings, llm.model_config.dtype)
    return Ceilings(
        read_bytes_per_s=max(each.read_bytes_per_s for each in found),
        flops_per_s=max(each.flops_per_s for each in found),
    )


def _ceilings(holder: Holder, dtype: torch.dtype) -> Ceilings:
    return measure_ceilings(holder.runner.step.buffers.input_ids.device, dtype)
