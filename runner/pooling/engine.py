"""`PoolingEngine`: queued texts, run in batches of whole texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from piecegraph.errors import RequestError, UsageError
from piecegraph.runner.pooling.head import Activation
from piecegraph.runner.pooling.outputs import PoolingOutput, PoolingRequestOutput
from piecegraph.runner.pooling.params import PoolingParams
from piecegraph.runner.pooling.step import Text
from piecegraph.runner.pooling.task import PoolingTask

if TYPE_CHECKING:
    from piecegraph.runner.pooling.runner import PoolingRunner

PooledOutput = PoolingRequestOutput[PoolingOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRules:
    """What becomes of a pooled row, by a request's parameters."""

    task: PoolingTask
    size: int  # of a row
    normalize: bool  # unless the request says otherwise
    matryoshka: tuple[int, ...] | None  # the dimensions that may be asked for; (): any; None: none
    activation: Activation | None  # of a classifier

    def check(self, params: PoolingParams) -> None:
        """Raise `RequestError` for parameters that this model cannot follow."""
        params.check_task(self.task.value)
        if params.dimensions is None or params.dimensions == self.size:
            return
        if self.matryoshka is None:
            raise RequestError(
                f"dimensions={params.dimensions}, but the model's config does not say that it is a Matryoshka model, "
                f"so part of its {self.size} dimensions means little. If it is one: "
                'LLM(..., hf_overrides={"is_matryoshka": True}).'
            )
        if self.matryoshka and params.dimensions not in self.matryoshka:
            raise RequestError(
                f"dimensions={params.dimensions}; the model was trained for {', '.join(map(str, self.matryoshka))}."
            )
        if params.dimensions > self.size:
            raise RequestError(f"dimensions={params.dimensions}, but the model's embeddings have {self.size}.")

    def finish(self, row: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Return what a caller gets for a row `[size]`, or for those of tokens, `[num_tokens, size]`."""
        if self.task is PoolingTask.CLASSIFY:
            assert self.activation is not None, "a classifier has an activation"
            return row if params.use_activation is False else self.activation(row)
        if params.dimensions is not None:
            row = row[..., : params.dimensions]
        is_normal = self.normalize if params.normalize is None else params.normalize
        return torch.nn.functional.normalize(row, dim=-1) if is_normal else row


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingStats:
    """What a pooling engine does and has done."""

    num_running: int  # texts of the step that runs
    num_waiting: int  # texts that no step has run
    num_tokens: int  # pooled since the start


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    request_id: str
    text: Text
    params: PoolingParams
    of_tokens: bool


class PoolingEngine:
    """A queue of texts and the loop over it; first come, first served.

    A text is computed whole, in one step. After an exception in a step, its texts are still queued.
    """

    def __init__(
        self,
        *,
        runner: PoolingRunner,
        rules: OutputRules,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        num_token_types: int,
    ) -> None:
        self._runner = runner
        self.rules = rules
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = vocab_size
        self.num_token_types = num_token_types  # 0: the model tells no texts of a pair apart
        self._waiting: dict[str, _Request] = {}
        self._num_ids = 0
        self._num_running = 0  # texts of the step that runs
        self._num_tokens = 0  # pooled since the start

    @property
    def stats(self) -> PoolingStats:
        """Return the counts of now; any thread may ask."""
        running = self._num_running
        return PoolingStats(
            num_running=running, num_waiting=max(len(self._waiting) - running, 0), num_tokens=self._num_tokens
        )

    @property
    def has_unfinished(self) -> bool:
        """Return whether any request is queued."""
        return bool(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def new_ids(self, count: int) -> list[str]:
        """Return ids that no request has or had, unless a caller chose it."""
        ids: list[str] = []
        while len(ids) < count:
            if str(self._num_ids) not in self._waiting:
                ids.append(str(self._num_ids))
            self._num_ids += 1
        return ids

    def check_request(self, text: Text, params: PoolingParams) -> None:
        """Raise `RequestError` for a text or parameters that cannot run."""
        self.rules.check(params)
        tokens, kinds = text.token_ids, text.token_type_ids
        if not tokens:
            raise RequestError("the prompt has no tokens; give some text.")
        if len(tokens) > self.max_model_len:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, and the model takes at most {self.max_model_len}. Shorten it; "
                "PoolingParams(truncate_prompt_tokens=-1) has the tokenizer cut texts to that length."
            )
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"token id {token} is not in the vocabulary (0 to {self.vocab_size - 1}).")
        if kinds is not None:
            if len(kinds) != len(tokens):
                raise RequestError(f"{len(tokens)} token ids, but {len(kinds)} token_type_ids; give one each.")
            if not all(0 <= kind < self.num_token_types for kind in kinds):
                raise RequestError(f"token_type_ids go from 0 to {self.num_token_types - 1} in this model.")

    def add_request(
        self,
        request_id: str,
        text: Text,
        params: PoolingParams | None = None,
        *,
        is_checked: bool = False,
        of_tokens: bool = False,
    ) -> None:
        """Queue a text; `is_checked`: `check_request` has passed it. `of_tokens`: a row for each token is wanted.

        Raises `RequestError` if it cannot run, and `UsageError` if the id is queued already.
        """
        params = PoolingParams() if params is None else params
        if not is_checked:
            self.check_request(text, params)
        if request_id in self._waiting:
            raise UsageError(f"request {request_id!r} is queued already; give each request an id of its own.")
        self._waiting[request_id] = _Request(request_id=request_id, text=text, params=params, of_tokens=of_tokens)

    def abort(self, request_id: str) -> None:
        """Drop a queued request. Unknown ids are ignored."""
        self._waiting.pop(request_id, None)

    def step(self) -> list[PooledOutput]:
        """Run the next batch and return its outputs; nothing if nothing is queued."""
        batch = self._next_batch()
        if not batch:
            return []
        self._num_running = len(batch)
        try:
            texts = [request.text for request in batch]
            if batch[0].of_tokens:
                self._runner.execute_model(texts, of_tokens=True)
                rows: Sequence[torch.Tensor] = self._runner.pool().split([len(text.token_ids) for text in texts])
            else:
                self._runner.execute_model(texts)
                rows = self._runner.pool().unbind()
        except BaseException:
            self._runner.reset()
            raise
        finally:
            self._num_running = 0
        self._num_tokens += sum(len(request.text.token_ids) for request in batch)
        for request in batch:
            self._waiting.pop(request.request_id, None)
        return [
            PoolingRequestOutput(
                request_id=request.request_id,
                outputs=PoolingOutput(self.rules.finish(row, request.params)),
                prompt_token_ids=list(request.text.token_ids),
            )
            for request, row in zip(batch, rows, strict=True)
        ]

    def _next_batch(self) -> Sequence[_Request]:
        """Return the first waiting requests that fit into a step; equal lengths are adjacent, for attention.

        All want rows of texts, or all want those of tokens.
        """
        batch: list[_Request] = []
        num_tokens = 0
        for request in self._waiting.values():
            num_tokens += len(request.text.token_ids)
            if num_tokens > self._max_num_batched_tokens or len(batch) == self.max_num_seqs:
                break
            if batch and request.of_tokens is not batch[0].of_tokens:
                break
            batch.append(request)
        return sorted(batch, key=lambda request: len(request.text.token_ids))
