"""`GenerationSteps`, the steps of an engine that generates text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from piecegraph.errors import ConfigError, ModelError, RequestError
from piecegraph.runner.output.outbox import Outbox

if TYPE_CHECKING:
    from piecegraph.runner.common.outputs import RequestOutput
    from piecegraph.runner.common.sampling_params import SamplingParams
    from piecegraph.runner.engine.engine import Engine
    from piecegraph.runner.lora.request import LoRARequest
    from piecegraph.runner.prompts.tokenize import TokenizedPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A checked prompt with its parameters."""

    prompt: TokenizedPrompt
    params: SamplingParams
    priority: int = 0
    is_final_only: bool = False  # only the finished output is returned
    lora_request: LoRARequest | None = None  # None: the model itself


class GenerationSteps:
    """The steps of `engine`, whose outputs go to an outbox of their own. Implements `Steps`."""

    def __init__(self, engine: Engine, use_idle_moment: Callable[[], float | None] = lambda: None) -> None:
        """`use_idle_moment` is `LLM.use_idle_moment`."""
        self._engine = engine
        self._use_idle_moment = use_idle_moment
        self._outbox = Outbox()

    @property
    def has_unfinished(self) -> bool:
        """Return whether the engine has an unfinished request."""
        return self._engine.has_unfinished_for(self._outbox)

    def add(self, request_id: str, request: GenerationRequest) -> None:
        """Queue a checked prompt. Raises `RequestError` for an id that is in use, and for an adapter that is gone."""
        try:
            self._engine.add_request(
                request_id,
                request.prompt.token_ids,
                request.params,
                prompt=request.prompt.text,
                priority=request.priority,
                cache_salt=request.prompt.cache_salt,
                lora_request=request.lora_request,
                is_final_only=request.is_final_only,
                is_checked=True,
                outbox=self._outbox,
            )
        except (ModelError, ConfigError) as error:  # the adapter was evicted since, and its files have changed
            raise RequestError(str(error)) from error

    def is_waiting(self, request_id: str) -> bool:
        """Return whether no completion of the request has been scheduled."""
        return self._engine.is_waiting(request_id)

    def abort(self, request_id: str) -> None:
        """End a request."""
        self._engine.abort(request_id)

    def use_idle_moment(self) -> float | None:
        """Go on with the start, and look whether a rank or an engine has ended."""
        return self._use_idle_moment()

    def step(self) -> Sequence[RequestOutput]:
        """Run a step and return the outputs of this object's requests."""
        return self._engine.step(self._outbox)
