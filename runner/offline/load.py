"""The loading of an `LLM`: import torch and transformers, then load an engine or a pooler."""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import TYPE_CHECKING

from piecegraph.compiler.workers.prestart import started_early
from piecegraph.errors import ConfigError, translate_out_of_memory
from piecegraph.paused_gc import paused_gc
from piecegraph.progress import OnPhase, Phase, timed_phase
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.data_parallel.engine_processes import EngineProcesses
from piecegraph.runner.data_parallel.loaded_elsewhere import LoadedElsewhere, load_elsewhere
from piecegraph.runner.distributed.protocol import Executor
from piecegraph.runner.distributed.worker import compare_on_all_stages
from piecegraph.weight_files import prefetch

if TYPE_CHECKING:
    from piecegraph.runner.pooling.load import LoadedPooler
    from piecegraph.runner.startup.loaded import Loaded


def load(
    config: EngineConfig, on_phase: OnPhase | None, executor: Executor | EngineProcesses
) -> tuple[Loaded | LoadedElsewhere | None, LoadedPooler | None]:
    """Import torch and transformers, then load the engine or the pooler; the other of the two results is None.

    Before the imports, compile processes are started if the model will probably be compiled, and the operating system
    is asked to read the weight files.
    """
    early = started_early(
        config.compile.compile_workers,
        partial(_will_compile, config),
        has_kernels=config.device is None or str(config.device).startswith("cuda"),
    )
    if "torch" in sys.modules:  # an earlier model may be garbage whose memory is needed
        gc.collect()
    prefetch(config.source.weight_files)
    with paused_gc(), early, executor.while_loading():
        if on_phase is not None:
            on_phase(Phase(name="import", detail="torch, transformers"))
        with timed_phase(on_phase, "import"):
            import transformers  # noqa: F401  here, so that no later phase is charged for the import

            from piecegraph.runner.pooling.task import pooling_task

            task = pooling_task(config)
            if task is None:
                from piecegraph.runner.startup.load_engine import load_engine
            else:
                from piecegraph.runner.pooling.load import load_pooler

                if config.num_ranks > 1:
                    raise ConfigError(
                        "a model that pools runs on one rank only; leave tensor_parallel_size and "
                        "pipeline_parallel_size out."
                    )
                if config.data_parallel_size > 1:
                    raise ConfigError("a model that pools runs in one engine only; leave data_parallel_size out.")
                if config.sizes_from_traffic:
                    raise ConfigError(
                        "a model that pools counts no batches; leave cudagraph_capture_sizes='traffic' out."
                    )
                if config.quantization is not None:
                    raise ConfigError("a model that pools cannot be quantised yet; leave quantization out.")
        if isinstance(executor, EngineProcesses):
            return load_elsewhere(config, executor, on_phase), None
        with translate_out_of_memory():
            if task is None:
                loaded = load_engine(config, executor.watched(on_phase), executor.parallel())
                compare_on_all_stages(executor, loaded)
                return loaded, None
            return None, load_pooler(config, task, on_phase)


def _will_compile(config: EngineConfig) -> bool:
    """Return whether the model will probably be compiled, as a look at the cache suggests."""
    from piecegraph.runner.startup.compile_guess import will_compile

    return config.start == "full" and will_compile(config)
