"""The output processor: from sampled tokens to text, log probabilities and finish reasons."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from piecegraph.runner.common.sampling_params import RequestOutputKind, SamplingParams
from piecegraph.runner.output.async_output import PromptLogprobs, TokenLogprobs
from piecegraph.runner.output.detokenizer import Detokenizer, token_decoder
from piecegraph.runner.output.logprob_rows import LogprobRows, truncate_row
from piecegraph.runner.output.make_output import make_output
from piecegraph.runner.output.outbox import Outbox, PendingOutput
from piecegraph.runner.output.prompt_state import TOUCHED, Completion, Delivered, Finish, PromptState, failed
from piecegraph.runner.scheduling.request import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _QuietBatch:
    """Requests whose tokens need no processing before their ends, and that step together."""

    requests: Sequence[Request]
    stop_token_ids: frozenset[int]  # of any of them
    steps_left: int  # until the first reaches its maximum length


class OutputProcessor:
    """The owner of what callers see of the unfinished requests; the scheduler owns the requests.

    Note [what survives an exception]: a prompt is unfinished while the processor holds it, a completion while its
    request has no `finish_reason`; its tokens and their log probabilities are lists that only grow. All other state, of
    this class, the scheduler and the runner, follows from these, and is rebuilt from them when an exception has
    interrupted a call (`start_over`). So each of them is changed by one assignment or one append, after everything that
    can fail.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._decode = None if tokenizer is None else token_decoder(tokenizer)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._prompts: dict[str, PromptState] = {}
        self._completions: dict[str, Completion] = {}  # by the id of the scheduler's request
        self._last_requests: Sequence[Request] = ()
        self._quiet: _QuietBatch | None = None  # of `_last_requests`

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def prompt_state(
        self, request_id: str, prompt: str | None, requests: Sequence[Request], *, is_final_only: bool, outbox: Outbox
    ) -> PromptState:
        """Return the state of a new prompt whose completions are `requests`, all with the same prompt tokens.

        Changes nothing; raises what the tokenizer raises about the prompt.
        """
        first = requests[0]
        params = first.sampling_params
        is_final_only = is_final_only or params.output_kind is RequestOutputKind.FINAL_ONLY
        made = PromptState(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=first.prompt_token_ids,
            is_final_only=is_final_only,
            is_delta=params.output_kind is RequestOutputKind.DELTA,
            arrival_time=time.time(),
            queued_ts=time.monotonic(),
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * first.num_prompt_tokens,
            outbox=outbox,
        )
        made.completions += [
            Completion(
                prompt=made,
                index=index,
                request=request,
                detokenizer=self._detokenizer(first.prompt_token_ids, params),
                is_text_late=is_final_only and not params.stop_strings,
                logprobs=self._logprob_rows(params),
                cumulative_logprob=None if params.logprobs is None else 0.0,
                is_quiet=is_final_only
                and params.logprobs is None
                and not params.stop_strings
                and params.structured_outputs is None,
                max_output=request.max_total_tokens - request.num_prompt_tokens,
            )
            for index, request in enumerate(requests)
        ]
        return made

    def add(self, prompt: PromptState) -> None:
        """Add a prompt, whose requests' tokens are processed from now on."""
        self._completions.update({one.request.request_id: one for one in prompt.completions})
        self._prompts[prompt.request_id] = prompt  # last, see Note [what survives an exception]

    def drop(self, prompt: PromptState) -> None:
        """Undo an `add` that was interrupted, even before its start. `start_over` does the rest."""
        self._prompts.pop(prompt.request_id, None)

    def request_ids(self, request_id: str) -> tuple[str, ...]:
        """Return the scheduler's ids of a prompt's unfinished completions."""
        prompt = self._prompts[request_id]
        return tuple(c.request.request_id for c in prompt.completions if c.request.finish_reason is None)

    def prompt(self, request_id: str) -> PromptState:
        """Return an unfinished prompt."""
        return self._prompts[request_id]

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """The scheduler's unfinished requests, in order of arrival."""
        prompts = self._prompts.values()
        return tuple(c.request for prompt in prompts for c in prompt.completions if c.request.finish_reason is None)

    def take_tokens(
        self,
        requests: Sequence[Request],
        logprobs: Mapping[str, TokenLogprobs],
        tokens: Sequence[int] | None = None,
    ) -> tuple[list[tuple[Request, Finish]], list[str]]:
        """Call `take_token` for every request to which a step gave a token.

        Returns the requests that end, and the ids of prompts with news, which are also added to the callers' outboxes
        unless the caller wants the final output only. A request whose processing raises ends with that error; a
        MemoryError is raised.

        `tokens`: the same tokens in order, if the caller has them as a list. For the same list object of requests,
        which must then hold the same requests, a step that ends none and whose tokens need no processing costs no loop.
        """
        is_same = requests is self._last_requests
        if is_same and self._is_quiet(tokens):
            return [], []
        ended: list[tuple[Request, Finish]] = []
        news: dict[str, None] = {}
        completions, now = self._completions, time.monotonic()
        for request in requests:
            completion = completions[request.request_id]
            output = request.output_token_ids
            if not completion.first_token_ts:
                completion.first_token_ts = now
            if completion.is_quiet and len(output) < completion.max_output and output[-1] not in request.stop_token_ids:
                continue  # the common case of a large batch
            completion.last_token_ts = now
            prompt = completion.prompt
            news[prompt.request_id] = None
            if not prompt.is_final_only:
                prompt.outbox.news[prompt] = None
            try:
                finish = self.take_token(request, logprobs.get(request.request_id))
            except MemoryError:
                raise
            except Exception as error:
                finish = failed(request, error)
            if finish is not None:
                ended.append((request, finish))
        if not is_same:
            self._last_requests, self._quiet = requests, None
        elif self._quiet is None:
            self._quiet = self._quiet_batch(requests)
        return ended, list(news)

    def _is_quiet(self, tokens: Sequence[int] | None) -> bool:
        """Return True if `tokens`, the next of each of the last requests, end none and need no processing."""
        quiet = self._quiet
        if quiet is None:
            return False
        quiet.steps_left -= 1
        return quiet.steps_left > 0 and tokens is not None and quiet.stop_token_ids.isdisjoint(tokens)

    def _quiet_batch(self, requests: Sequence[Request]) -> _QuietBatch | None:
        """Return the requests as a quiet batch, or None if a token of one of them needs processing."""
        completions = [self._completions[request.request_id] for request in requests]
        if not completions or not all(completion.is_quiet for completion in completions):
            return None
        return _QuietBatch(
            requests=requests,
            stop_token_ids=frozenset().union(*[request.stop_token_ids for request in requests]),
            steps_left=min([one.max_output - len(one.request.output_token_ids) for one in completions]),
        )

    def take_several(
        self, requests: Sequence[tuple[Request, int]], logprobs: Mapping[str, Sequence[TokenLogprobs]]
    ) -> tuple[list[tuple[Request, Finish]], int]:
        """Call `take_token` for the last tokens of each request, as many as are given, which one step gave it.

        The tokens after one that ends a request are removed. Returns the requests that end, and how many tokens were
        removed; for the rest see `take_tokens`.
        """
        ended: list[tuple[Request, Finish]] = []
        num_removed, now = 0, time.monotonic()
        for request, count in requests:
            completion = self._completions[request.request_id]
            output = request.output_token_ids
            num_before = len(output) - count
            if not completion.first_token_ts:
                completion.first_token_ts = now
            is_long = len(output) >= completion.max_output
            if completion.is_quiet and not is_long and request.stop_token_ids.isdisjoint(output[num_before:]):
                continue
            completion.last_token_ts = now
            if not completion.prompt.is_final_only:
                completion.prompt.outbox.news[completion.prompt] = None
            rows = logprobs.get(request.request_id)
            for place in range(count):
                try:
                    finish = self.take_token(request, None if rows is None else rows[place], num_before + place + 1)
                except MemoryError:
                    raise
                except Exception as error:
                    finish = failed(request, error)
                if finish is not None:
                    num_removed += count - place - 1
                    del output[num_before + place + 1 :]
                    ended.append((request, finish))
                    break
        self._last_requests, self._quiet = (), None
        return ended, num_removed

    def take_token(
        self, request: Request, logprobs: TokenLogprobs | None, num_output: int | None = None
    ) -> Finish | None:
        """Process one of a request's `output_token_ids`, the last unless `num_output` says which of them is.

        Returns the reason if the completion ends with it.
        `min_tokens` needs no check here: the sampler does not draw tokens that would end the completion too early.
        """
        completion = self._completions[request.request_id]
        output = request.output_token_ids
        num_output = len(output) if num_output is None else num_output
        completion.num_taken = TOUCHED
        if completion.logprobs is not None:
            assert logprobs is not None and completion.cumulative_logprob is not None
            completion.logprobs.append(logprobs)
            completion.cumulative_logprob += logprobs.logprobs[0]
        completion.finish = self._take_text(completion, output[num_output - 1], num_output)
        completion.num_taken = num_output
        return completion.finish

    def _take_text(self, completion: Completion, token: int, num_output: int) -> Finish | None:
        """Add the text of a token, the last of `num_output`; returns the reason if the completion ends with it."""
        params = completion.request.sampling_params
        is_eos = token in self._eos_token_ids and not params.ignore_eos
        is_stop = token in (params.stop_token_ids or ())
        is_text = not (is_eos or is_stop) or params.include_stop_str_in_output
        if completion.detokenizer is not None and is_text and not completion.is_text_late:
            stop_string = completion.detokenizer.append(token)
            if stop_string is not None:
                return Finish("stop", stop_string)
        if is_eos or is_stop:
            return Finish("stop", None if is_eos else token)
        return Finish("length") if num_output >= completion.max_output else None

    def take_prompt_logprobs(self, request_id: str, found: PromptLogprobs) -> None:
        """Add log probabilities of a part of a request's prompt; those of a repeated chunk replace the first."""
        completion = self._completions.get(request_id)
        if completion is None or completion.prompt.prompt_logprobs is None:
            return  # the request has ended meanwhile
        wanted = completion.request.sampling_params.prompt_logprobs
        assert wanted is not None, "log probabilities of a prompt that asks for none"
        rows = [truncate_row(row, wanted) for row in found.positions]
        completion.prompt.made_prompt_logprobs = None
        completion.prompt.prompt_logprobs[found.start : found.start + len(rows)] = rows

    def finish(self, request: Request, finish: Finish) -> None:
        """End a request: make the rest of its text, and set its `finish_reason`. `forget` must follow.

        If the text cannot be made, the request ends with that error.
        """
        completion = self._completions[request.request_id]
        completion.num_taken = TOUCHED
        try:
            if finish.reason != "error":
                _finish_text(completion, finish)
        except MemoryError:
            raise
        except Exception as error:
            finish = failed(request, error)
        request.stop_reason, request.error = finish.stop_reason, finish.error
        request.finish_reason = finish.reason  # last: this ends the request

    def forget(self, request: Request) -> None:
        """Remove a request that has ended, and its prompt if it was the last: then the caller's outbox gets news."""
        prompt = self._completions[request.request_id].prompt
        del self._completions[request.request_id]
        if prompt.is_finished:
            self._remove(prompt)

    def start_over(self, logprobs: Mapping[str, Sequence[TokenLogprobs]]) -> list[tuple[Request, Finish]]:
        """Rebuild all state from the tokens of the unfinished requests, after an exception in any call.

        Returns the requests that end with these tokens. `logprobs`: those of the last tokens, a row each, where they
        may not have been processed.
        """
        self._last_requests, self._quiet = (), None
        for prompt in tuple(self._prompts.values()):
            if prompt.is_finished:
                self._remove(prompt)
        self._completions = {
            completion.request.request_id: completion
            for prompt in self._prompts.values()
            for completion in prompt.completions
            if completion.request.finish_reason is None
        }
        ended = []
        for request_id, completion in self._completions.items():
            finish = self._take_again_twice(completion, logprobs.get(request_id))
            if finish is not None:
                ended.append((completion.request, finish))
        return ended

    def _take_again_twice(self, completion: Completion, logprobs: Sequence[TokenLogprobs] | None) -> Finish | None:
        """Return the result of `_take_again`, or the end with its error if it raises twice.

        An error that does not occur again is not the request's.
        """
        try:
            return self._take_again(completion, logprobs)
        except MemoryError:
            raise
        except Exception:
            logger.warning("request %r: its tokens are processed once more", completion.request.request_id)
        try:
            return self._take_again(completion, logprobs)
        except MemoryError:
            raise
        except Exception as error:
            return failed(completion.request, error)

    def _take_again(self, completion: Completion, logprobs: Sequence[TokenLogprobs] | None) -> Finish | None:
        """Process the request's tokens that were not processed, or not completely.

        Tokens after one that ends the completion, which only a step with drafts may have left, are removed.
        """
        request, output = completion.request, completion.request.output_token_ids
        if completion.num_taken == len(output) or not output:
            return completion.finish
        if completion.num_taken == TOUCHED or not completion.is_text_late:
            completion.num_taken = TOUCHED
            completion.detokenizer = self._detokenizer(request.prompt_token_ids, request.sampling_params)
        finish = None
        num_received = len(output)
        for at in range(num_received):
            finish = self._take_text(completion, output[at], at + 1)
            if finish is not None:
                del output[at + 1 :]
                break
        if completion.logprobs is not None:
            missing = num_received - len(completion.logprobs)
            if missing > 0:
                assert logprobs is not None, f"{request.request_id!r} has a token without its log probability"
                for row in logprobs[len(logprobs) - missing :][: len(output) - len(completion.logprobs)]:
                    completion.logprobs.append(row)
            assert len(completion.logprobs) == len(output), "each token has a row"
            completion.cumulative_logprob = 0.0
            for row in completion.logprobs.rows:
                completion.cumulative_logprob += row.logprobs[0]
        completion.finish = finish
        completion.num_taken = len(output)
        return finish

    def settle(self) -> None:
        """Give every request of an unfinished prompt its tokens, and release it from any batch (`Settles`)."""
        for prompt in self._prompts.values():
            for completion in prompt.completions:
                request = completion.request
                if request.batched_by is not None:
                    request.batched_by.settle()
                    request.batched_by = None

    def notify(self, request_id: str) -> None:
        """Report news of the prompt of an unfinished request of the scheduler, unless only its end is wanted."""
        prompt = self._completions[request_id].prompt
        if not prompt.is_final_only:
            prompt.outbox.news[prompt] = None

    def _remove(self, prompt: PromptState) -> None:
        prompt.outbox.news[prompt] = None
        del self._prompts[prompt.request_id]

    def output(self, prompt: PromptState, delivered: Delivered) -> PendingOutput | None:
        """Return a prompt's output; see `make_output`."""
        return make_output(prompt, delivered, self._decode)

    def _logprob_rows(self, params: SamplingParams) -> LogprobRows | None:
        if params.logprobs is None:
            return None
        decode = self._decode if params.detokenize else None
        return LogprobRows(params.logprobs, decode, is_flat=params.flat_logprobs)

    def _detokenizer(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Detokenizer | None:
        if self._tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self._tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop_strings=params.stop_strings,
            include_stop_string=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )


def _finish_text(completion: Completion, finish: Finish) -> None:
    request, detokenizer = completion.request, completion.detokenizer
    if detokenizer is None:
        return
    if completion.is_text_late:
        tokens = request.output_token_ids
        ended_by_grammar = request.grammar is not None and tokens[-1] not in request.stop_token_ids
        is_stop_token = finish.reason == "stop" and not ended_by_grammar
        hides_last = is_stop_token and not request.sampling_params.include_stop_str_in_output
        detokenizer.add_unread(tokens[:-1] if hides_last else tokens)
    if not isinstance(finish.stop_reason, str):
        detokenizer.finish()
