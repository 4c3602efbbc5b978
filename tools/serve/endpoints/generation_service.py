"""`GenerationService`, the service of a model that generates text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from piecegraph.runner.prompts.tokenize import TokenizedPrompt
from piecegraph.tools.serve.endpoints.served_adapters import ServedAdapters
from piecegraph.tools.serve.endpoints.service import Service
from piecegraph.tools.serve.endpoints.settings import ServeSettings
from piecegraph.tools.serve.engine.engine_thread import OutputStream, WaitedTooLong
from piecegraph.tools.serve.engine.generation_steps import GenerationRequest, GenerationSteps

if TYPE_CHECKING:
    from piecegraph.runner.common.outputs import RequestOutput
    from piecegraph.runner.common.sampling_params import SamplingParams
    from piecegraph.runner.llm import LLM
    from piecegraph.runner.lora.request import LoRARequest


class GenerationService(Service):
    """The service of an `LLM` that generates."""

    unit: ClassVar[str] = "completions"

    def __init__(
        self, llm: LLM, settings: ServeSettings, *, on_failure: Callable[[BaseException], None] = lambda error: None
    ) -> None:
        super().__init__(
            llm,
            settings,
            GenerationSteps(llm.engine, llm.use_idle_moment),
            device=llm.device,
            max_num_reqs=llm.max_num_seqs,
            vocab_size=llm.engine.vocab_size,
            on_failure=on_failure,
        )
        self.adapters = ServedAdapters(llm, settings, self.model_names)

    def known_models(self) -> tuple[str, ...]:
        """Return the names of the model, and those of its adapters."""
        return *self.model_names, *(each.lora_name for each in self.adapters)

    async def check(self, prompt: TokenizedPrompt, params: SamplingParams, holding: ExitStack) -> None:
        """Raise `RequestError` if the engine cannot run such a prompt. Waits until its grammar is compiled.

        The grammar is kept until `holding` is closed. Raises `TooManyGrammars`, and `WaitedTooLong` if the grammar is
        not compiled in the time for which a request may wait.
        """
        if params.structured_outputs is not None and self._tokenizer is not None:
            compiled = holding.enter_context(self.llm.engine.grammars.held(params.structured_outputs))
            try:
                async with asyncio.timeout(self.settings.max_wait_s):
                    await _until_done(compiled)
            except TimeoutError:
                waited = f"the request has waited for {self.settings.max_wait_s:g} s for its grammar; try again later."
                raise WaitedTooLong(waited) from None
            compiled.result()
        self.llm.engine.check_request(prompt.token_ids, params)

    async def outputs(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        *,
        priority: int,
        is_final_only: bool,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield a prompt's outputs; a reader that stops earlier, or is cancelled, aborts the prompt."""
        self._num_prompts += 1
        request = GenerationRequest(
            prompt=prompt, params=params, priority=priority, is_final_only=is_final_only, lora_request=lora_request
        )
        stream: OutputStream[RequestOutput] = self.thread.submit(f"{request_id}#{self._num_prompts}", request)
        num_tokens = [0] * params.n
        try:
            while True:
                output = await stream.get()
                for completion in output.outputs:
                    num_tokens[completion.index] += len(completion.token_ids)
                if output.finished:
                    self.metrics.observe(output, params, num_tokens, time.monotonic())
                yield output
                if output.finished:
                    return
        finally:
            self.thread.abort(stream)


async def _until_done(future: Future[Any]) -> None:
    """Wait until another thread has ended `future`, for which others may wait, too; raises nothing that it holds."""
    loop, is_done = asyncio.get_running_loop(), asyncio.Event()

    def tell(done: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(is_done.set)

    future.add_done_callback(tell)
    await is_done.wait()
