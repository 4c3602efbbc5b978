"""`DecodeBatch`, requests that decode together without the scheduler, for benches that time steps by themselves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch

from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError, PiecegraphError
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.cudagraphs.dispatcher import Dispatched
from piecegraph.runner.engine.model_runner import ModelRunner
from piecegraph.runner.scheduling.scheduler_output import ScheduledRequest
from piecegraph.runner.step.batch import Batch
from piecegraph.tools.bench.measure.engines import Holder, from_engines, has_own_engine

if TYPE_CHECKING:
    from piecegraph.runner.distributed.worker import Worker
    from piecegraph.runner.llm import LLM

T = TypeVar("T")

WARMUP_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of one engine that are timed; every rank runs them over its own state of the same requests."""

    batch: Batch
    prompt_lens: tuple[int, ...]
    context: int
    prefill_tokens: int

    @classmethod
    def of(cls, name: str, num_requests: int, decoded: int, context: int, prefill_tokens: int) -> Steps:
        """Return steps of `num_requests` requests with prompts of `decoded` tokens, and of one more that prefills."""
        has_prefill = prefill_tokens > 0
        decode = (1,) * num_requests
        batch = Batch(
            request_ids=tuple(f"{name}-{i}" for i in range(num_requests + has_prefill)),
            query_lens=(*decode, prefill_tokens) if has_prefill else decode,
            num_decode_reqs=num_requests,
        )
        lens = (decoded,) * num_requests + (prefill_tokens,) * has_prefill
        return cls(batch=batch, prompt_lens=lens, context=context, prefill_tokens=prefill_tokens)

    def prepared(self, runner: ModelRunner, mode: CUDAGraphMode) -> tuple[torch.Tensor, Dispatched, Callable[[], None]]:
        """Return each row's computed tokens at the first step, how steps run, and the function that runs one."""
        batch, states = self.batch, runner.step.states
        num_computed = states.num_computed_tokens
        start = torch.full_like(num_computed, self.context)
        if self.prefill_tokens:
            start[states.row(batch.request_ids[-1])] = 0
        scheduled = [
            ScheduledRequest(request_id, query_len, self.context if query_len == 1 else 0, False, 0)
            for request_id, query_len in zip(batch.request_ids, batch.query_lens, strict=True)
        ]
        dispatched = runner.dispatch(batch, mode)

        def run() -> None:
            if self.prefill_tokens:
                num_computed.copy_(start)  # the same step again
            runner.run(batch, dispatched, scheduled)

        return start, dispatched, run


Place: TypeAlias = tuple[int, int]
"""Where a rank of one of several engines is: its process, and the address of its runner there."""

Shares: TypeAlias = Mapping[Place | None, Steps]
"""The steps of each rank that has some; None stands for all ranks of an only engine."""


def _place(holder: Holder) -> Place:
    return os.getpid(), id(holder.runner)


def share_of(shares: Shares, holder: Holder) -> Steps | None:
    """Return the steps of a rank, or None if its engine has no request."""
    return shares.get(None) or shares.get(_place(holder))


def _place_and_rank(worker: Worker) -> tuple[Place, int]:
    return _place(worker.loaded), worker.rank


def shares_of(llm: LLM, batch_size: int, steps_of: Callable[[int], Steps]) -> Shares:
    """Return the steps of all ranks. Several engines have shares that differ by one request at most."""
    if has_own_engine(llm):
        return {None: steps_of(batch_size)}
    places: list[tuple[Place, int]] = llm.collective_rpc(_place_and_rank)
    num_engines = sum(rank == 0 for _, rank in places)
    shares: dict[Place | None, Steps] = {}
    engine = -1
    for place, rank in places:  # by engine, and by rank
        engine += rank == 0
        num_requests = batch_size // num_engines + (engine < batch_size % num_engines)
        if num_requests:
            shares[place] = steps_of(num_requests)
    return shares


def _begin(holder: Holder, shares: Shares) -> PiecegraphError | None:
    """Compute the prompts of an engine's share and hold its steps. Return why its requests do not run, if so."""
    timed, engine = share_of(shares, holder), holder.engine
    if timed is None:
        return None
    ids, lens = timed.batch.request_ids, timed.prompt_lens
    meanwhile = 2 + sum(lens) // holder.runner.step.buffers.max_num_tokens + len(lens)  # decoded before all are there
    generator = torch.Generator().manual_seed(0)
    for request_id, num_tokens in zip(ids, lens, strict=True):
        most = min(holder.max_model_len - num_tokens, meanwhile)
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
        prompt = torch.randint(engine.vocab_size, (num_tokens,), generator=generator).tolist()
        try:
            engine.add_request(request_id, prompt, params, is_final_only=True)
        except PiecegraphError as error:
            return error
    while all(request_id in engine.requests for request_id in ids):
        if all(engine.requests[each].num_computed_tokens >= engine.requests[each].num_prompt_tokens for each in ids):
            vars(engine)["step"] = _no_step  # in front of the method of its class
            return None
        engine.step()
    return ConfigError(
        f"{timed.batch.num_decode_reqs} requests of {timed.context} tokens do not run at once: some ended before "
        "others began. Raise max_num_seqs or max_model_len, or give the cache more memory."
    )


def _no_step(outbox: object = None) -> list[RequestOutput]:
    """Do nothing in place of a step that an engine's own process would run, and let other threads run."""
    time.sleep(0.001)
    return []


def _end(holder: Holder, shares: Shares) -> None:
    """Abort the requests of an engine's share, and let it step again."""
    timed = share_of(shares, holder)
    vars(holder.engine).pop("step", None)
    for request_id in timed.batch.request_ids if timed is not None else ():
        holder.engine.abort(request_id)


class DecodeBatch:
    """A batch of requests whose prompts are computed, and long enough for every step that is timed.

    Steps are driven without the scheduler, from `context` tokens on, over the blocks and tokens that the requests
    have. Several engines each have a share of the batch, and run no step of their own meanwhile. Raises `ConfigError`
    if the requests do not fit, or do not run at once.
    """

    def __init__(self, llm: LLM, batch_size: int, context: int, steps: int, prefill_tokens: int) -> None:
        decoded = context + steps + WARMUP_STEPS + 2
        longest = max(decoded, prefill_tokens) + 2
        if longest > llm.max_model_len:
            raise ConfigError(f"{longest} tokens a request do not fit max_model_len={llm.max_model_len}; raise it.")
        name = f"latency-{batch_size}"
        self.batch_size = batch_size
        self._llm = llm
        self._shares = shares_of(llm, batch_size, lambda size: Steps.of(name, size, decoded, context, prefill_tokens))

    def __enter__(self) -> DecodeBatch:
        errors = [error for error in from_engines(self._llm, _begin, self._shares) if error is not None]
        if errors:
            self.__exit__()
            raise errors[0]
        return self

    def __exit__(self, *exc_info: object) -> None:
        from_engines(self._llm, _end, self._shares)

    def on_ranks(self, function: Callable[..., T | None], *args: object) -> list[T]:
        """Return what `function(worker, shares, *args)` returns on all ranks, by engine and rank, without None.

        It runs on all of them at the same time, and finds the steps of its rank by `share_of`.
        """
        found: list[T | None] = self._llm.collective_rpc(function, args=(self._shares, *args))
        return [each for each in found if each is not None]

    def run_once(self, mode: CUDAGraphMode) -> None:
        """Run one step of the engine in this process, from `context` tokens on."""
        with torch.no_grad():
            start, _, run = self._shares[None].prepared(self._llm.runner, mode)
            self._llm.runner.step.states.num_computed_tokens.copy_(start)
            run()
