"""`Service`, what the endpoints share: the model, its thread, its tokenizer, the places for requests."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from piecegraph.errors import RequestError, did_you_mean, shorten
from piecegraph.runner.prompts.chat import ChatOptions, tokenize_chat
from piecegraph.runner.prompts.tokenize import TokenizedPrompt, tokenize, tokenize_text
from piecegraph.tools.serve.endpoints.metrics import ServerMetrics
from piecegraph.tools.serve.endpoints.settings import ServeSettings
from piecegraph.tools.serve.engine.engine_thread import EngineThread
from piecegraph.tools.serve.engine.steps import Steps
from piecegraph.tools.serve.protocol.error_replies import ApiError, bad_request

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from piecegraph.runner.llm import LLM

_T = TypeVar("_T")

TOKENS_MARGIN = 4
"""The factor by which a text may have more characters than the longest tokens could cover, before it is refused
without being tokenized: a tokenizer may drop characters."""


class Service:
    """The model and the state of the server, of which all attributes are used by the event loop's thread alone.

    Prompts are tokenized by one more thread with a copy of the tokenizer, because the engine's thread uses the
    original, and neither the loop nor the engine should wait. The subclasses run the model, to generate or to pool.
    """

    unit: ClassVar[str]
    """What a place is held for, in the plural."""

    def __init__(
        self,
        llm: LLM,
        settings: ServeSettings,
        steps: Steps[Any, Any],
        *,
        device: torch.device,
        max_num_reqs: int,
        vocab_size: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.llm = llm
        self.settings = settings
        self.vocab_size = vocab_size
        self.model_names = settings.served_model_name or (llm.model_name,)
        self.created = int(time.time())
        self.is_draining = False
        self.is_falling_asleep = False  # the engine's memory is about to be given back
        self.num_open = 0  # of `unit` that run or wait, those of requests that are being tokenized included
        self.num_requests = 0  # HTTP requests that are read, run or answered
        self.max_open = max_num_reqs + settings.max_num_queued_reqs
        self.metrics = ServerMetrics(self.model_names[0], llm.get_metrics)
        self.thread: EngineThread[Any, Any] = EngineThread(
            steps, device=device, max_wait_s=settings.max_wait_s, on_failure=on_failure
        )
        self._tokenizer = copy.deepcopy(llm.tokenizer)
        self.template = _template(llm)
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._max_chars = _most_characters(self._tokenizer, llm.max_model_len)
        self._num_prompts = 0

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps, by a request or a call of the program's, or is about to."""
        return self.is_falling_asleep or self.llm.is_sleeping

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The copy of the tokenizer, for `in_tokenizer_thread`. Raises `ApiError` if there is none."""
        if self._tokenizer is None:
            raise bad_request("the server has no tokenizer (skip_tokenizer_init); give token ids.")
        return self._tokenizer

    def close(self, timeout_s: float) -> bool:
        """End the threads; returns whether the engine's has ended within `timeout_s`. Idempotent."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        return self.thread.stop(timeout_s)

    def known_models(self) -> tuple[str, ...]:
        """Return the names that requests may call a model by."""
        return self.model_names

    def check_model(self, name: str | None) -> str:
        """Return the model's name in replies. Raises `ApiError` if a request names another model."""
        known = self.known_models()
        if name is None or name in known:
            return name or known[0]
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"model={shorten(name)!r} is not served here.{did_you_mean(name, known)}",
            param="model",
            code="model_not_found",
        )

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Hold `count` places. Raises `ApiError` if as many are not free."""
        if self.is_draining:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down.", code="shutting_down")
        if self.is_asleep:
            what = "; POST /wake_up wakes it up" if self.settings.enable_sleep_mode else ""
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"the engine sleeps{what}.", code="sleeping")
        if not self.thread.is_alive:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, self.thread.end_reason, code="engine_stopped")
        if count > self.max_open:
            raise bad_request(f"the request asks for {count} {self.unit}; the server takes at most {self.max_open}.")
        if self.num_open + count > self.max_open:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self.num_open} {self.unit} run or wait, of at most {self.max_open}; try again later.",
                code="queue_full",
            )
        self.num_open += count
        try:
            yield
        finally:
            self.num_open -= count

    async def in_tokenizer_thread(self, work: Callable[[], _T]) -> _T:
        """Run `work` in the thread that tokenizes."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    async def tokenized(
        self, prompt: str | list[int], *, add_special_tokens: bool, cache_salt: str | None
    ) -> TokenizedPrompt:
        """Return a prompt of text or token ids as the engine takes it."""
        if not isinstance(prompt, str):
            return tokenize({"prompt_token_ids": prompt, "cache_salt": cache_salt}, None)
        self.check_length(prompt)
        tokenizer = self.tokenizer
        found = await self.in_tokenizer_thread(
            lambda: tokenize_text(prompt, tokenizer, add_special_tokens=add_special_tokens)
        )
        return TokenizedPrompt(text=found.text, token_ids=found.token_ids, cache_salt=cache_salt or "")

    async def rendered(self, messages: list[dict[str, Any]], options: ChatOptions, salt: str | None) -> TokenizedPrompt:
        """Return a conversation as the engine takes it."""
        self.check_length(*_texts(messages))
        tokenizer = self.tokenizer
        found = await self.in_tokenizer_thread(lambda: tokenize_chat(messages, tokenizer, options))
        return TokenizedPrompt(text=found.text, token_ids=found.token_ids, cache_salt=salt or "")

    def check_template(self, template: str | None) -> str | None:
        """Return the chat template to use: the request's if that is allowed, else the server's."""
        if template is None:
            return self.llm.chat_template
        if not self.settings.trust_request_chat_template:
            raise bad_request("chat_template is not accepted from requests (--trust-request-chat-template allows it).")
        return template

    def check_length(self, *texts: str) -> None:
        """Raise `ApiError` if a prompt of these texts has more characters than the model's longest prompt can have."""
        num_chars = sum(len(text) for text in texts)
        if num_chars > self._max_chars:
            raise bad_request(
                f"the prompt has {num_chars} characters, more than max_model_len={self.llm.max_model_len} tokens can "
                "hold. Shorten it.",
                code="context_length_exceeded",
            )


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts of a conversation, those of messages with several parts included."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else (content,):
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text


def _most_characters(tokenizer: PreTrainedTokenizerBase | None, max_model_len: int) -> float:
    """Return a number of characters that no prompt of the model's length has."""
    if tokenizer is None:
        return math.inf
    longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
    return TOKENS_MARGIN * longest * max_model_len


def _template(llm: LLM) -> str:
    """Return the text of the chat template; "" if there is none."""
    found = llm.chat_template or getattr(llm.tokenizer, "chat_template", None) or ""
    return str(found.get("default", "")) if isinstance(found, dict) else found


def refused(error: RequestError) -> ApiError:
    """Return the error for a request that the runner refuses."""
    text = str(error)
    is_long = "leaves room for at most" in text
    return bad_request(text, code="context_length_exceeded" if is_long else None)
