from __future__ import annotations

from piecegraph.runner.clusters.make_executor import make_executor
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.distributed.executor import UniProcExecutor


def test_one_rank_needs_no_other_process() -> None:
    config = EngineConfig(source=ModelSource(model="m"))
    assert config.distributed_executor_backend == "uniproc"
    executor = make_executor(config)
    assert isinstance(executor, UniProcExecutor)
    assert executor.parallel() is None
