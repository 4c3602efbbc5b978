"""Scheduler, KV cache manager and block pool together: any order of arrivals, steps, completions and aborts, over a
simulated device that checks every key and value it reads.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from piecegraph.runner.scheduling.kv_cache_group import KVCacheGroup
from piecegraph.runner.scheduling.kv_cache_manager import KVCacheManager
from piecegraph.runner.scheduling.request import Request
from piecegraph.runner.scheduling.request_queue import SchedulingPolicy
from piecegraph.runner.scheduling.scheduler import Scheduler
from piecegraph.runner.scheduling.scheduler_output import SampledTokens, ScheduledDecodes, SchedulerOutput
from tests.runner.scheduling.make_request import make_request
from tests.runner.scheduling.simulated_device import SimulatedDevice, next_token

LAYOUTS = st.sampled_from(
    [(None,), (None,), (3,), (8,), (None, 5), (4, None), (None, 2, 9), (1,)],
).map(lambda windows: tuple(KVCacheGroup(sliding_window=window) for window in windows))
PREFIXES = {"sevens": [7] * 30, "a few sevens": [7] * 6 + [8] * 24, "all unlike": list(range(30))}
"""Prompts are cut from these: many share blocks, some only the first ones."""


class Ask(NamedTuple):
    prefix: str
    num_prompt: int
    last: int  # token of the prompt
    num_output: int
    priority: int
    prompt_logprobs: bool
    salt: str


ASKS = st.builds(
    Ask,
    prefix=st.sampled_from(sorted(PREFIXES)),
    num_prompt=st.integers(1, 24),
    last=st.integers(0, 3),
    num_output=st.integers(1, 16),
    priority=st.integers(0, 2),
    prompt_logprobs=st.sampled_from([False, False, False, True]),
    salt=st.sampled_from(["", "", "", "x"]),
)


def as_told(output: SchedulerOutput, sampled: Mapping[str, int]) -> Mapping[str, int]:
    """As the model runner tells the tokens of a steady decode."""
    if not isinstance(output.scheduled, ScheduledDecodes):
        return sampled
    return SampledTokens(output.scheduled.request_ids, [*sampled.values()])


class SchedulerMachine(RuleBasedStateMachine):
    """The test plays the engine: it schedules ahead, completes steps in order, stops and aborts requests."""

    @initialize(
        groups=LAYOUTS,
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(4, 30),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 12),
        max_in_flight=st.integers(1, 3),
        policy=st.sampled_from(SchedulingPolicy),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
        enable_prefix_caching=st.sampled_from([True, True, False]),
    )
    def start(
        self,
        groups: tuple[KVCacheGroup, ...],
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        max_in_flight: int,
        policy: SchedulingPolicy,
        watermark: float,
        enable_prefix_caching: bool,
    ) -> None:
        self.kv_cache = KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            groups=groups,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            kv_cache=self.kv_cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            policy=policy,
            watermark=watermark,
            prompt_logprobs_chunk=3,
        )
        self.device = SimulatedDevice(block_size=block_size, groups=groups, num_blocks=num_blocks)
        self.max_num_seqs, self.budget, self.max_in_flight = max_num_seqs, budget, max_in_flight
        self.in_flight: deque[tuple[SchedulerOutput, dict[str, int], list[Request]]] = deque()
        self.live: dict[str, Request] = {}
        self.ids = itertools.count()

    @rule(asks=st.lists(ASKS, min_size=1, max_size=4))
    def add(self, asks: list[Ask]) -> None:
        for ask in asks:
            request = make_request(
                f"r{next(self.ids)}",
                [*PREFIXES[ask.prefix][: ask.num_prompt - 1], ask.last],
                ask.num_output,
                priority=ask.priority,
                prompt_logprobs=ask.prompt_logprobs,
                cache_salt=ask.salt,
            )
            if self.scheduler.can_ever_fit(request.max_total_tokens):
                self.scheduler.add(request)
                self.live[request.request_id] = request

    @rule(num_steps=st.integers(1, 8))
    def schedule(self, num_steps: int) -> None:
        """More steps in flight, the oldest completed where there would be more than may be."""
        for _ in range(num_steps):
            if len(self.in_flight) == self.max_in_flight:
                self.complete()
            self.step()

    @precondition(lambda self: self.in_flight)
    @rule()
    def complete(self) -> None:
        """Tell the oldest step in flight, and stop who has reached its end or drew token 1 twice."""
        output, sampled, requests = self.in_flight.popleft()
        took = self.scheduler.complete_step(output, as_told(output, sampled))
        assert list(took) == [request for request in requests if self.live.get(request.request_id) is request]
        for request in took:
            if request.num_tokens == request.max_total_tokens:
                self.finish(request, "length")
            elif request.output_token_ids[-2:] == [1, 1]:
                self.finish(request, "stop")

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_id_used_again=st.booleans())
    def abort(self, data: st.DataObject, is_id_used_again: bool) -> None:
        """Any request, at any time. A step in flight for it must not tell a new one of its id anything."""
        old = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self.finish(old, "abort")
        if is_id_used_again:
            new = make_request(old.request_id, [9, *old.prompt_token_ids[1:]], 1)
            self.device.forget_computations(new.request_id)
            self.scheduler.add(new)
            self.live[new.request_id] = new

    @rule()
    def reset_prefix_cache(self) -> None:
        """Whoever is added from here on must find nothing computed before: as if the weights had changed."""
        self.scheduler.reset_prefix_cache()
        self.device.generation += 1

    def step(self) -> SchedulerOutput:
        scheduler = self.scheduler
        num_preemptions = scheduler.stats.num_preemptions
        output = scheduler.schedule()
        if output.is_empty:
            assert not (output.added or output.new_blocks or output.removed)
            return output
        scheduled = [item.num_tokens for item in output.scheduled]
        assert output.num_tokens <= self.budget
        assert len({item.request_id for item in output.scheduled}) == len(scheduled) <= self.max_num_seqs
        assert sorted(scheduled, key=lambda num_tokens: num_tokens != 1) == scheduled
        if scheduler.stats.num_preemptions > num_preemptions:
            assert not output.added
        num_prompt_rows = 0
        for item in output.scheduled:
            request = self.live[item.request_id]  # KeyError: it has ended
            if request.wants_prompt_logprobs and item.num_computed_tokens < request.num_prompt_tokens:
                num_prompt_rows += item.num_tokens - (item.is_sampled and item.num_tokens == 1)
        assert num_prompt_rows <= 3, "each is a row of logits"
        sampled = self.device.run(output)
        self.in_flight.append((output, sampled, [self.live[item.request_id] for item in output.sampled]))
        return output

    def finish(self, request: Request, reason: str) -> None:
        assert self.scheduler.finish(request.request_id, reason) is request
        assert request.finish_reason == reason
        assert self.scheduler.finish(request.request_id, reason) is None
        del self.live[request.request_id]
        tokens = request.token_ids(0, request.num_tokens)
        for length in range(request.num_prompt_tokens, request.num_tokens):
            assert tokens[length] == next_token(tokens[:length]), "an output token is lost, doubled or another's"
        # Each stay computes each position once, so more computations need as many preemptions.
        computations = [n for (name, _), n in self.device.num_computations.items() if name == request.request_id]
        assert max(computations, default=0) <= 1 + request.num_preemptions

    @invariant()
    def references_are_those_of_tables(self) -> None:
        """A block has as many references as there are tables with it, and is free without any."""
        if not hasattr(self, "kv_cache"):
            return
        pool = self.kv_cache.pool
        holders: Counter[int] = Counter()
        for request in self.live.values():
            if request.num_slots:
                for group in range(len(self.kv_cache.groups)):
                    held = [block for block in self.kv_cache.table(request.request_id, group) if block is not None]
                    assert len(set(held)) == len(held)
                    holders.update(held)
        assert [pool.num_references(block) for block in range(pool.num_blocks)] == [
            holders[block] for block in range(pool.num_blocks)
        ]
        assert pool.num_free == sum(pool.is_free(block) for block in range(pool.num_blocks))

    @invariant()
    def tokens_are_counted(self) -> None:
        """computed <= known + pending <= max; requests are running or waiting."""
        if not hasattr(self, "kv_cache"):
            return
        for request in self.live.values():
            assert 0 <= request.num_pending_tokens <= len(self.in_flight)
            assert request.num_computed_tokens <= request.num_tokens_with_pending <= request.max_total_tokens
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.has_unfinished == bool(self.live)

    def teardown(self) -> None:
        """Everything ends, in so many steps, and all blocks are free."""
        if not hasattr(self, "kv_cache"):
            return
        for _ in range(5000):
            if not self.live:
                break
            if self.step().is_empty or len(self.in_flight) > self.max_in_flight:
                self.complete()  # IndexError: an empty step while none is in flight
            self.references_are_those_of_tables()
            self.tokens_are_counted()
        assert not self.live, "requests that never end"
        assert self.kv_cache.num_free_blocks == self.kv_cache.num_blocks
        while self.in_flight:
            output, sampled, _ = self.in_flight.popleft()
            assert self.scheduler.complete_step(output, sampled) == []
        assert self.scheduler.schedule().is_empty


SchedulerMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduler = SchedulerMachine.TestCase
