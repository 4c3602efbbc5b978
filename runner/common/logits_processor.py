"""The interface of custom logits processors: batch-level, with vLLM's names."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from piecegraph.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from piecegraph.runner.common.sampling_params import SamplingParams


class MoveDirectionality(Enum):
    """The two ways in which requests change their rows."""

    UNIDIRECTIONAL = auto()
    """The request of the first row moves to the second row, which was empty."""
    SWAP = auto()
    """The requests of the two rows are exchanged."""


AddedRequest = tuple[int, "SamplingParams", list[int] | None, list[int]]
"""The row, the parameters, the prompt tokens, and the list to which output tokens are appended before each step."""

MovedRequest = tuple[int, int, MoveDirectionality]
"""The row before, the row after, and what happens to a request in the second row."""


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """The changes of the batch since the preceding step, to be applied in the order removed, added, moved.

    An added or moved request may take the row of another request, which has then left the batch.
    """

    batch_size: int  # the rows in use are 0 to batch_size - 1
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorConfig:
    """The part of vLLM's `VllmConfig` that a processor's constructor receives, under vLLM's names."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Model:
        """The part of vLLM's `ModelConfig` that a processor can read."""

        hf_config: Any
        max_model_len: int
        vocab_size: int

        def get_vocab_size(self) -> int:
            """Return the number of tokens in a row of logits."""
            return self.vocab_size

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Scheduler:
        """The part of vLLM's `SchedulerConfig` that a processor can read."""

        max_num_seqs: int
        max_num_batched_tokens: int

    model_config: Model
    scheduler_config: Scheduler


class LogitsProcessor(ABC):
    """A base class for code that changes the logits of a batch before tokens are sampled.

    Subclasses are passed to `LLM(logits_processors=[...])`. One object serves all requests: each request chooses by
    its `SamplingParams.extra_args` whether and how it is processed.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise `ValueError` if a request's parameters are invalid for this processor; the request is then refused."""
        return

    @abstractmethod
    def __init__(self, vllm_config: LogitsProcessorConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Construct the processor, once, when the engine is loaded.

        Host memory that is copied to the device should be pinned if `is_pin_memory`.
        """

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return whether the processor leaves the likeliest token the likeliest.

        Such a processor is applied after the penalties to logits divided by the temperature, and greedy requests
        skip it; any other processor is applied before the penalties, to all requests.
        """

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of the batch; None means that its rows have not changed.

        Called before each step, after the preceding step's output tokens were appended.
        """

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the new logits `[batch_size, vocab_size]` float32: `logits` changed in place, or a new tensor."""

    def served_rows(self) -> Collection[int] | None:
        """Return the rows of the batch that `apply` can change; None: any row.

        If `apply` raises, the requests of these rows end with `finish_reason` "error" and all others continue.
        """
        return None

    def take_failures(self) -> Mapping[int, BaseException]:
        """Return and forget the exceptions of single requests, by row, that `apply` has caught.

        Each of these requests ends with `finish_reason` "error".
        """
        return {}


RequestLogitsProcessor = Callable[..., "torch.Tensor"]
"""A function of one request's `(output_token_ids, logits)` or `(prompt_token_ids, output_token_ids, logits)` that
returns the new logits `[vocab_size]`."""


class AdapterLogitsProcessor(LogitsProcessor):
    """A logits processor that calls one function per request, made by `new_req_logits_processor`."""

    def __init__(self, vllm_config: LogitsProcessorConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._failures: dict[int, BaseException] = {}  # by row, since the last call of `take_failures`

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the function for a request with these parameters, or None if the request needs none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of the batch: make, move and drop functions along with their requests."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.req_info.pop(row, None)
        for row, params, prompt, output in batch_update.added:
            self.req_info.pop(row, None)
            try:
                process = self.new_req_logits_processor(params)
                if process is not None:
                    self.req_info[row] = _bind(process, prompt, output)
            except PROCESSOR_ERRORS as error:
                self.req_info[row] = partial(_raise, error)
        for source, target, direction in batch_update.moved:
            moved, other = self.req_info.pop(source, None), self.req_info.pop(target, None)
            if moved is not None:
                self.req_info[target] = moved
            if other is not None and direction is MoveDirectionality.SWAP:
                self.req_info[source] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply each request's function to the request's row; mutates and returns `logits`.

        The row of a function that raises, or that returns no logits, counts as failed (`take_failures`).
        """
        for row, process in tuple(self.req_info.items()):
            try:
                logits[row] = checked_logits(process(logits[row]), logits[row])
            except PROCESSOR_ERRORS as error:
                self._failures[row] = error
        return logits

    def served_rows(self) -> Collection[int]:
        """Return the rows of the requests that have a function."""
        return self.req_info.keys()

    def take_failures(self) -> Mapping[int, BaseException]:
        """Return and forget the exceptions of the functions of single requests, by row."""
        failures, self._failures = self._failures, {}
        return failures


PROCESSOR_ERRORS = (Exception, SystemExit, GeneratorExit)
"""The exceptions of a logits processor that end its requests. A `KeyboardInterrupt` is the user's and is raised."""


def checked_logits(made: object, given: torch.Tensor) -> torch.Tensor:
    """Return `made`, the logits that a processor returned for `given`.

    Raises `TypeError` or `ValueError` unless `made` is a dense real tensor with the shape and the device of `given`.
    """
    import torch

    if not isinstance(made, torch.Tensor):
        raise TypeError(f"the logits processor returned {type(made).__name__}; it must return a tensor of logits.")
    if made.layout is not torch.strided or made.is_nested or made.is_complex():
        raise TypeError(f"the logits processor returned {made.dtype}, {made.layout}; it must be dense and real.")
    if made.shape != given.shape or made.device != given.device:
        raise ValueError(
            f"the logits processor returned {list(made.shape)} on {made.device}; it must return {list(given.shape)} on "
            f"{given.device}."
        )
    return made


def _raise(error: BaseException, logits: torch.Tensor) -> torch.Tensor:
    raise error


def _bind(
    process: RequestLogitsProcessor, prompt: list[int] | None, output: list[int]
) -> Callable[[torch.Tensor], torch.Tensor]:
    if len(signature(process).parameters) == 3:
        return lambda logits: process(prompt, output, logits)
    return lambda logits: process(output, logits)


LogitsProcessors = tuple[type[LogitsProcessor], ...]


def logits_processor_classes(given: Iterable[str | type] | None) -> LogitsProcessors:
    """Return the classes that `LLM`'s `logits_processors` names: classes, or strings `"module:Class"` to import.

    Raises `ConfigError` for an element that is not a logits processor.
    """
    if given is None:
        return ()
    if isinstance(given, str | type) or not isinstance(given, Iterable):
        raise ConfigError(f"logits_processors={given!r}; it must be a list of classes, or of names 'module:Class'.")
    return tuple(_processor_class(one) for one in given)


def _processor_class(given: object) -> type[LogitsProcessor]:
    found = _import_class(given) if isinstance(given, str) else given
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise ConfigError(
            f"logits_processors has {given!r}; it must be a subclass of piecegraph.LogitsProcessor, or the name of one "
            "as 'module:Class'. Wrap a function of a single request in an AdapterLogitsProcessor."
        )
    return found


def _import_class(name: str) -> object:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever importing a caller's module raises
        raise ConfigError(f"logits_processors has {name!r}, which cannot be imported: {error}") from error
    return found
