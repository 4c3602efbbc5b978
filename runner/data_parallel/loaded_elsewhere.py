"""What an `LLM` holds when its engines are in other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from piecegraph.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from piecegraph.compiler.common.report import CompileReport
    from piecegraph.compiler.compiled_model import CompiledModel
    from piecegraph.progress import OnPhase
    from piecegraph.runner.common.engine_config import EngineConfig
    from piecegraph.runner.data_parallel.engine_processes import EngineProcesses
    from piecegraph.runner.data_parallel.front_door import FrontDoor
    from piecegraph.runner.engine.model_runner import ModelRunner
    from piecegraph.runner.inspect.selfcheck import SelfcheckReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedElsewhere:
    """Engines in other processes, with those attributes of `Loaded` that can be read from here.

    What holds tensors or graphs raises `UsageError`.
    """

    engine: FrontDoor
    tokenizer: PreTrainedTokenizerBase | None
    hf_config: PretrainedConfig
    max_model_len: int
    max_num_seqs: int  # requests that run at once, on all engines together
    device: torch.device  # of this process: steps run elsewhere
    sampling_defaults: Mapping[str, Any]
    dtype: torch.dtype
    report: CompileReport  # of the first engine
    notes: tuple[str, ...]  # of the first engine
    selfcheck: SelfcheckReport | None  # of the first engine
    start: None = None  # nothing remains of it: these engines start full

    @property
    def runner(self) -> ModelRunner:
        """Raise `UsageError`: each engine has one, in its process."""
        _refuse("the model runner")

    @property
    def compiled(self) -> CompiledModel:
        """Raise `UsageError`: each engine has one, in its process."""
        _refuse("the compiled model")


def load_elsewhere(config: EngineConfig, processes: EngineProcesses, on_phase: OnPhase | None) -> LoadedElsewhere:
    """Read what the front door needs, and wait until all engines are ready.

    Raises what loading an engine raises, before an engine does if the config or the tokenizer cannot be read.
    """
    import torch

    from piecegraph.runner.data_parallel.front_door import FrontDoor
    from piecegraph.runner.models.config.load_config import load_config
    from piecegraph.runner.models.config.tokenizer import load_tokenizer

    check_gpus(config, torch.cuda.device_count())
    hf_config = load_config(config.source)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config.source, config.tokenizer)
    facts = processes.wait_until_ready(on_phase)
    first = facts[0]
    return LoadedElsewhere(
        engine=FrontDoor(config=config, processes=processes, facts=facts, tokenizer=tokenizer),
        tokenizer=tokenizer,
        hf_config=hf_config,
        max_model_len=min(each.max_model_len for each in facts),
        max_num_seqs=config.max_num_seqs * processes.num_engines,
        device=torch.device("cpu"),
        sampling_defaults=first.sampling_defaults,
        dtype=first.dtype,
        report=first.report,
        notes=first.notes,
        selfcheck=first.selfcheck,
    )


def check_gpus(config: EngineConfig, num_gpus: int) -> None:
    """Raise `ConfigError` unless each rank of each engine has a GPU of its own, where GPUs are used."""
    device = str(config.device)
    if device.partition(":")[0] == "cpu" or (config.device is None and not num_gpus):
        return
    num_engines, num_ranks = config.data_parallel_size, config.num_ranks
    if device.startswith("cuda:"):
        raise ConfigError(f"device={device!r} with {num_engines} engines, each of which has its GPU; give 'cuda'.")
    if num_gpus < num_engines * num_ranks:
        raise ConfigError(
            f"data_parallel_size={num_engines} engines of {num_ranks} ranks need {num_engines * num_ranks} GPUs, and "
            f"torch sees {num_gpus} here; give fewer, or device='cpu'."
        )


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        f"with data_parallel_size the engines are in processes of their own, and {what} with them; call a function "
        "there through collective_rpc."
    )
