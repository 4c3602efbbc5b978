"""`PoolingService`, the service of a model that pools texts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from piecegraph.errors import RequestError
from piecegraph.tools.serve.endpoints.service import Service
from piecegraph.tools.serve.endpoints.settings import ServeSettings
from piecegraph.tools.serve.engine.engine_thread import OutputStream
from piecegraph.tools.serve.engine.pooling_steps import PoolingRequest, PoolingSteps
from piecegraph.tools.serve.protocol.error_replies import ApiError, bad_request

if TYPE_CHECKING:
    from piecegraph.runner.llm import LLM
    from piecegraph.runner.pooling.engine import PooledOutput
    from piecegraph.runner.pooling.params import PoolingParams
    from piecegraph.runner.pooling.step import Text

TEXTS_AT_ONCE = 32
"""The number of texts that are tokenized before another request may have its turn."""

STEPS_AHEAD = 2
"""The number of full steps that one request may have queued, so that long requests leave room for short ones."""


class PoolingService(Service):
    """The service of an `LLM` that pools."""

    unit: ClassVar[str] = "texts"

    def __init__(
        self, llm: LLM, settings: ServeSettings, *, on_failure: Callable[[BaseException], None] = lambda error: None
    ) -> None:
        self.pooler = llm.pooler
        engine = self.pooler.engine
        super().__init__(
            llm,
            settings,
            PoolingSteps(engine),
            device=self.pooler.runner.step.buffers.input_ids.device,
            max_num_reqs=engine.max_num_seqs,
            vocab_size=engine.vocab_size,
            on_failure=on_failure,
        )
        self._most_at_once = min(STEPS_AHEAD * engine.max_num_seqs, self.max_open)

    def num_places(self, num_texts: int) -> int:
        """Return the number of places that a request of `num_texts` holds: so many of them are queued at a time."""
        return min(num_texts, self._most_at_once)

    async def texts(
        self,
        inputs: Sequence[str | list[int]],
        params: PoolingParams,
        *,
        names: Sequence[str],
        options: Mapping[str, Any] | None,
    ) -> list[Text]:
        """Return the inputs as the engine takes them, all of them checked.

        `names`: what errors call them. `options` are passed to the tokenizer. Raises `ApiError`.
        """
        self.pooler.engine.rules.check(params)
        limit, wanted = self.llm.max_model_len, params.truncate_prompt_tokens
        if wanted is not None and wanted > limit:
            raise bad_request(f"truncate_prompt_tokens={wanted}, but the model takes at most {limit}; give -1.")
        if wanted is None:
            for one in inputs:
                if isinstance(one, str):
                    self.check_length(one)
        found: list[Text] = []
        for first in range(0, len(inputs), TEXTS_AT_ONCE):
            some = list(zip(inputs, names, strict=True))[first : first + TEXTS_AT_ONCE]
            found += await self.in_tokenizer_thread(
                lambda some=some: [self._text(one, name, params, options) for one, name in some]  # type: ignore[misc]
            )
        return found

    def _text(self, one: str | list[int], name: str, params: PoolingParams, options: Mapping[str, Any] | None) -> Text:
        """Tokenize and check one input. Raises `ApiError`."""
        from piecegraph.runner.pooling.requests import tokenized_text  # with torch, which the model has imported

        try:
            text = tokenized_text(self.pooler, one, params, options)
            num_tokens, limit = len(text.token_ids), self.llm.max_model_len
            if num_tokens > limit:
                cut = " or have it cut with truncate_prompt_tokens=-1" if isinstance(one, str) else ""
                raise bad_request(
                    f"{name} has {num_tokens} tokens, and the model takes at most {limit}. Shorten it{cut}.",
                    code="context_length_exceeded",
                )
            self.pooler.engine.check_request(text, params)
        except RequestError as error:
            raise bad_request(f"{name}: {error}") from error
        except ApiError as error:
            error.param = "input"
            raise
        return text

    async def pooled(self, request_id: str, texts: Sequence[Text], params: PoolingParams) -> list[PooledOutput]:
        """Return an output for each text, in their order. A caller that is cancelled drops those that have not run."""
        found: dict[int, PooledOutput] = {}
        numbers = iter(range(len(texts)))

        async def work() -> None:
            for number in numbers:
                found[number] = await self._pooled(request_id, PoolingRequest(text=texts[number], params=params))

        workers = [asyncio.ensure_future(work()) for _ in range(self.num_places(len(texts)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return [found[number] for number in range(len(texts))]

    async def _pooled(self, request_id: str, request: PoolingRequest) -> PooledOutput:
        self._num_prompts += 1
        started = time.monotonic()
        stream: OutputStream[PooledOutput] = self.thread.submit(f"{request_id}#{self._num_prompts}", request)
        try:
            output = await stream.get()
        finally:
            self.thread.abort(stream)
        self.metrics.observe_pooled(len(output.prompt_token_ids), time.monotonic() - started)
        return output
