"""The generating methods of `LLM`: `generate`, `chat`, `stream` and `beam_search`, and the loop that they share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from piecegraph.errors import RequestError
from piecegraph.runner.common.logprobs_mode import LogprobsMode
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.engine.progress_bar import progress_bar
from piecegraph.runner.lora.request import LoRARequest, per_prompt_loras
from piecegraph.runner.offline.loaded_llm import LoadedLLM
from piecegraph.runner.output.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from piecegraph.runner.output.outbox import Outbox
from piecegraph.runner.prompts.chat import ChatOptions, Message, conversation_sequence, tokenize_chat
from piecegraph.runner.prompts.request_options import per_request_priority, refuse_unknown_options
from piecegraph.runner.prompts.tokenize import Prompts, TokenizedPrompt, prompt_sequence, tokenize


class GeneratingLLM(LoadedLLM):
    """The methods that continue prompts."""

    _chat_template: str | None
    _logprobs_mode: LogprobsMode
    _num_requests: int  # the next request id; earlier calls have taken the smaller ones

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template that was given to the `LLM`; None: the tokenizer's own is used."""
        return self._chat_template

    def generate(
        self,
        prompts: Prompts = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **unknown: object,
    ) -> list[RequestOutput]:
        """Return one finished output for each prompt, in the order of the prompts.

        `prompts`: one prompt or several, each a string, token ids or a dictionary (docs/generation.md).
        `sampling_params`, `lora_request` and `priority` (lower values are scheduled first): one for all prompts, or one
        for each; an adapter is read from its folder unless it is loaded;
        without `sampling_params`, those of `get_default_sampling_params`. `use_tqdm`: True shows a progress bar on a
        terminal, False shows none, and a callable, called like `tqdm.tqdm`, makes one. `tokenization_kwargs` are passed
        to the tokenizer.

        Raises `RequestError`, before any prompt runs, if one of the prompts or parameters is refused, and
        `CheckpointError`, `UnsupportedModel` or `ConfigError` for an adapter that cannot be applied.
        """
        refuse_unknown_options("generate", unknown, mm_processor_kwargs=mm_processor_kwargs)
        tokenized = self._tokenize(prompts, tokenization_kwargs)
        return self._generate(tokenized, sampling_params, use_tqdm, priority, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **unknown: object,
    ) -> list[RequestOutput]:
        """Return what `generate` returns, for one conversation or several rendered with a chat template.

        The template is the argument `chat_template`, else that given to the `LLM`, else the model's own. `ChatOptions`
        documents the other options.
        """
        refuse_unknown_options("chat", unknown, mm_processor_kwargs=mm_processor_kwargs)
        options = ChatOptions(
            chat_template=chat_template if chat_template is not None else self._chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs={} if chat_template_kwargs is None else chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
        )
        conversations = conversation_sequence(messages)
        prompts = [tokenize_chat(conversation, self.tokenizer, options) for conversation in conversations]
        return self._generate(prompts, sampling_params, use_tqdm, priority, lora_request)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield outputs as tokens arrive. Each has all text of its prompt so far, unless `output_kind` says otherwise.

        The `request_id`s ascend in the order of the prompts. Ending the iteration early aborts the prompts that are
        unfinished.
        """
        return self._run(self._requests(self._tokenize(prompts), sampling_params, priority, lora_request))

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the likeliest continuations of each prompt, in the order of the prompts.

        `concurrency_limit`: how many prompts are searched at a time; None: all. `use_tqdm` is accepted as in vLLM, but
        no progress bar is shown. `lora_request`: one adapter for all prompts. Raises `RequestError` if the `LLM`
        has a `logprobs_mode` other than the default.
        """
        if isinstance(lora_request, Sequence):
            raise RequestError(
                "beam search takes one lora_request for all prompts; search in one call for each adapter."
            )
        if self._logprobs_mode is not LogprobsMode.RAW_LOGPROBS:
            raise RequestError(
                "beam search adds up the model's own log probabilities, and "
                f"logprobs_mode={self._logprobs_mode.value!r} returns other values; make an LLM without it."
            )
        tokenized = self._tokenize(prompts)
        tokenizer = self.tokenizer

        def decode(tokens: Sequence[int]) -> str:
            assert tokenizer is not None
            return str(tokenizer.decode(list(tokens), skip_special_tokens=params.skip_special_tokens))

        return beam_search(
            tokenized,
            params,
            lambda beams, one_token, priorities: self._generate(beams, one_token, False, priorities, lora_request),
            priorities=per_request_priority(priority, len(tokenized)),
            eos_token_ids=self.engine.eos_token_ids,
            max_model_len=self.max_model_len,
            decode=None if tokenizer is None else decode,
            concurrency_limit=concurrency_limit,
        )

    def _tokenize(
        self, prompts: Prompts, tokenization_kwargs: Mapping[str, Any] | None = None
    ) -> list[TokenizedPrompt]:
        return [tokenize(prompt, self.tokenizer, tokenization_kwargs) for prompt in prompt_sequence(prompts)]

    def _generate(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: int | Sequence[int] | None,
        lora_request: object = None,
    ) -> list[RequestOutput]:
        requests = self._requests(prompts, sampling_params, priority, lora_request)
        finished: dict[str, RequestOutput] = {}
        with progress_bar(len(requests), self.engine, shown=use_tqdm if self._shows_progress else False) as advance:
            for output in self._run(requests, is_final_only=True, on_step=advance):
                finished[output.request_id] = output
        return [finished[request_id] for request_id in requests]

    def _requests(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        lora_request: object,
    ) -> dict[str, _Queued]:
        """Return what is queued by new request id, in order. All are checked, and none is queued."""
        params = sampling_params if sampling_params is not None else self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            per_prompt = [params] * len(prompts)
        elif isinstance(params, Sequence) and not isinstance(params, str | bytes):
            per_prompt = list(params)
        else:
            raise RequestError(f"sampling_params={params!r}; it must be SamplingParams, one or one per prompt.")
        if len(per_prompt) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts, but {len(per_prompt)} sampling_params; give one, or one per prompt."
            )
        per_prompt = _snapshots(per_prompt)
        for prompt, one in zip(prompts, per_prompt, strict=True):
            self.engine.check_request(prompt.token_ids, one, prompt.embeds)
        priorities = per_request_priority(priority, len(prompts))
        loras = per_prompt_loras(lora_request, len(prompts))
        for each in dict.fromkeys(loras):
            self.engine.check_lora(each)
        first_id = self._first_free_id(len(prompts))
        self._num_requests = first_id + len(prompts)
        queued = map(_Queued, prompts, per_prompt, priorities, loras)
        return {str(first_id + i): each for i, each in enumerate(queued)}

    def _first_free_id(self, count: int) -> int:
        """Return the first of `count` consecutive numbers that no request in the engine has as its id."""
        first = self._num_requests
        for number in itertools.count(first):
            if number == first + count:
                return first
            if str(number) in self.engine:
                first = number + 1
        raise AssertionError("unreachable: itertools.count is infinite")

    def _run(
        self,
        requests: Mapping[str, _Queued],
        *,
        is_final_only: bool = False,
        on_step: Callable[[Sequence[RequestOutput]], None] = lambda outputs: None,
    ) -> Iterator[RequestOutput]:
        """Queue `requests` and yield their outputs until all are finished. Abort the unfinished ones if closed early.

        Several such iterators may be read in turns, and other callers may run steps of the engine meanwhile: each call
        has an outbox of its own, in which its outputs wait.
        """
        running: set[str] = set()
        outbox = Outbox()
        try:
            for request_id, (prompt, params, priority, lora_request) in requests.items():
                self.engine.add_request(
                    request_id,
                    prompt.token_ids,
                    params,
                    prompt=prompt.text,
                    priority=priority,
                    cache_salt=prompt.cache_salt,
                    prompt_embeds=prompt.embeds,
                    lora_request=lora_request,
                    is_final_only=is_final_only,
                    is_checked=True,  # by `_requests`, which checks all before any is queued
                    outbox=outbox,
                )
                running.add(request_id)
            while running:
                outputs = self.engine.collect(outbox) if outbox else self.engine.step(outbox)
                on_step(outputs)
                for output in outputs:
                    if output.finished:
                        running.discard(output.request_id)
                    yield output
        finally:
            for request_id in running:
                if self._loaded is not None:
                    self._loaded.engine.abort(request_id)


class _Queued(NamedTuple):
    """A prompt with everything that it is queued with."""

    prompt: TokenizedPrompt
    params: SamplingParams
    priority: int
    lora_request: LoRARequest | None


def _snapshots(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Return a snapshot of each element, one for each distinct object. Raises `RequestError` for another type."""
    taken: dict[int, SamplingParams] = {}
    for one in params:
        if not isinstance(one, SamplingParams):
            raise RequestError(f"sampling_params has {one!r}; it must be SamplingParams, one or one per prompt.")
        if id(one) not in taken:
            taken[id(one)] = one.snapshot()
    return [taken[id(one)] for one in params]
