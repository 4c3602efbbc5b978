"""The scales of cached keys and values at a start: found before anything is allocated, written into the caches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.kv_cache.scales import cache_scales, write_scales
from piecegraph.runner.models.checkpoint.tensors import prediction_layers
from piecegraph.runner.models.load import LoadedModel
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.startup.compiling.compile_model import CompiledLM
from piecegraph.runner.startup.make_runner import MadeRunner


def make_scaled_runner(
    loaded: LoadedModel,
    model: CompiledLM,
    config: EngineConfig,
    sampler: Sampler,
    make: Callable[..., MadeRunner],
    *of_rank: Any,
) -> MadeRunner:
    """Return what `make`, `make_runner` with its arguments, returns, with the scales of cached keys and values.

    Raises what `cache_scales` raises, before anything is allocated or captured.
    """
    find = functools.partial(
        cache_scales,
        config,
        model.layers,
        lambda *inputs: loaded.forward_module()(*inputs),
        vocab_size=sampler.vocab_size,
        max_model_len=sampler.max_model_len,
        device=loaded.device,
        of_drafts=prediction_layers(loaded.config),
    )
    scales = find()
    made = make(*of_rank)
    caches = made.runner.step.kv_caches
    write_scales(scales, caches)
    if config.calculate_kv_scales:
        made.runner.calibrate = lambda: write_scales(find(), caches)
    return made
