"""Random lives of two engines, one of which sleeps and wakes up in between: what they answer is the same.

Where one sleeps the other forgets its cached prefixes, so both run the same steps, over recorded graphs. Events are
drawn without looking at either engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM, LoRARequest, SamplingParams
from piecegraph.errors import UsageError
from piecegraph.runner.common.outputs import RequestOutput
from tests.runner.lora.adapters import write_adapter
from tests.runner.speculative.draft_models import drafts_by, save_first_layers
from tests.runner.speculative.drafting_llm import NGRAM, assert_same_logprobs
from tests.runner.tiny_models import llama_config, make_model, random_model, save

PREFIXES = ([7, 8, 9, 10] * 5, [7, 8, 9, 10, 40, 41, 42, 43, 44, 45, 46, 47], [40, 41] * 6)
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float32",
    "compiler": "eager",
    "graph_kind": "recorded",
    "attention_backend": "triton",
    "block_size": 4,
    "num_kv_blocks": 24,  # requests are preempted
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 48,
    "cudagraph_capture_sizes": (1, 2, 4, 8, 16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """A model, its first layer as a model that drafts, and adapters for it."""

    model: PreTrainedModel
    whole: Path
    draft: Path
    hybrid: Path
    adapters: Sequence[LoRARequest]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    model, folder = random_model(llama_config(vocab_size=64)), tmp_path_factory.mktemp("models")
    adapters = []
    for number in (1, 2):
        write_adapter(model, folder / f"adapter{number}", number)
        adapters.append(LoRARequest(f"adapter{number}", number, str(folder / f"adapter{number}")))
    return Models(
        model=model,
        whole=save(model, folder / "whole"),
        draft=save_first_layers(model, 1, folder / "draft"),
        hybrid=save(make_model("lfm2"), folder / "hybrid"),
        adapters=adapters,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of engine."""

    options: Mapping[str, Any] = field(default_factory=dict)
    levels: tuple[int, ...] = (1, 2)  # at which it sleeps
    takes_other_weights: bool = False
    has_adapters: bool = False
    drafts: bool = False
    is_hybrid: bool = False


KINDS = {
    "a step ahead": Kind(options={"async_scheduling": True}, takes_other_weights=True),
    "in step": Kind(takes_other_weights=True),
    "int8": Kind(options={"quantization": "int8"}),
    "adapters": Kind(options={"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2}, levels=(1,), has_adapters=True),
    "ngram": Kind(options={"speculative_config": NGRAM, "async_scheduling": True}),
    "draft model": Kind(levels=(1,), drafts=True),
    "states": Kind(is_hybrid=True),
}


class TwoLives:
    """The engine that sleeps, and the one that does not."""

    def __init__(self, kind: Kind, models: Models, sleeper: LLM, waker: LLM) -> None:
        self.kind, self.models, self.sleeper, self.waker = kind, models, sleeper, waker
        self.seen: Counter[str] = Counter()
        self._level = 0  # 0: awake
        self._has_other_weights = False
        self._num_added = 0

    @property
    def _both(self) -> tuple[LLM, LLM]:
        return self.sleeper, self.waker

    @property
    def _is_idle(self) -> bool:
        found = {llm.engine.has_unfinished for llm in self._both}
        assert len(found) == 1, "one of them has something to do"
        return not found.pop()

    def add(self, prompt: list[int], params: SamplingParams, adapter: int | None) -> None:
        name, self._num_added = str(self._num_added), self._num_added + 1
        lora = None if adapter is None or not self.kind.has_adapters else self.models.adapters[adapter]
        if self._level:
            with pytest.raises(UsageError, match="the engine sleeps; call wake_up first"):
                self.sleeper.engine.add_request(name, prompt, params, lora_request=lora)
            self.seen["refused"] += 1
            return
        for llm in self._both:
            llm.engine.add_request(name, prompt, params, lora_request=lora)

    def step(self) -> None:
        if self._is_idle:
            return
        found, expected = (llm.engine.step() for llm in self._both)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
            self.seen["finished"] += one.finished

    def drain(self) -> None:
        while not self._is_idle:
            self.step()

    def sleep(self, level: int) -> None:
        is_refused = level not in self.kind.levels or (level == 2 and self._has_other_weights)
        if not self._is_idle or is_refused:
            with pytest.raises(UsageError, match="unfinished" if not self._is_idle else "use level 1"):
                self.sleeper.sleep(level)
            self.seen["no sleep"] += 1
        else:
            freed = self.sleeper.sleep(level)
            assert freed == 0 or level > self._level  # tiny tensors may have no whole page
            self._level = max(level, self._level)
            self.waker.reset_prefix_cache()
            self.seen[f"level {level}"] += 1
        assert self.sleeper.is_sleeping == (self._level > 0)

    def wake_up(self) -> None:
        self.sleeper.wake_up()
        self._level = 0
        assert not self.sleeper.is_sleeping

    def load_adapter(self, number: int, *, evicts: bool) -> None:
        """Load or evict one, asleep or not."""
        if not self.kind.has_adapters:
            return
        request = self.models.adapters[number]
        for llm in self._both:
            adapters = llm.engine.adapters
            if evicts:
                adapters.remove(request.lora_int_id)
            else:
                adapters.add(request)
        self.seen["adapter"] += 1

    def reload(self, *, others: bool) -> None:
        """Write the weights of the files again, or others."""
        if others and not self.kind.takes_other_weights:
            return
        weights = None
        if others:
            weights = {name: torch.roll(value, 1, 0) for name, value in self.models.model.state_dict().items()}
        if self._level or not self._is_idle:
            with pytest.raises(UsageError, match="sleeps" if self._level else "unfinished"):
                self.sleeper.reload_weights(weights)
            return
        for llm in self._both:
            llm.reload_weights(weights)
        self._has_other_weights = others
        self.seen["reload"] += 1


def assert_same(found: RequestOutput, expected: RequestOutput) -> None:
    """Tokens, ends and log probabilities."""
    assert (found.request_id, found.finished) == (expected.request_id, expected.finished)
    for one, other in zip(found.outputs, expected.outputs, strict=True):
        assert list(one.token_ids) == list(other.token_ids)
        assert one.finish_reason == other.finish_reason
        assert_same_logprobs(one.logprobs, other.logprobs)
    assert_same_logprobs(found.prompt_logprobs, expected.prompt_logprobs)


@contextmanager
def two_lives(kind: Kind, models: Models) -> Iterator[TwoLives]:
    options = {**OPTIONS, **kind.options}
    if kind.drafts:
        options["speculative_config"] = drafts_by(models.draft)
    folder = models.hybrid if kind.is_hybrid else models.whole
    with LLM(folder, **options) as sleeper, LLM(folder, **options) as waker:
        yield TwoLives(kind, models, sleeper, waker)


def live(lives: TwoLives, random: Random, num_events: int) -> None:
    """Draw events; whatever is drawn, all that was begun ends, and each level is slept at once."""
    for _ in range(num_events):
        event = random.random()
        prompt = [*random.choice(PREFIXES), *(random.randrange(3, 60) for _ in range(random.randrange(4)))]
        params = SamplingParams(
            max_tokens=random.randrange(1, 9),
            temperature=random.choice((0.0, 0.0, 0.8)),
            seed=random.choice((None, 5)),
            logprobs=random.choice((None, None, 1)),
            ignore_eos=True,
        )
        number, level = random.randrange(2), random.choice((1, 1, 2))
        if event < 0.3:
            lives.add(prompt, params, random.choice((None, 0, 1)))
        elif event < 0.55:
            lives.step()
        elif event < 0.7:
            lives.drain()
        elif event < 0.82:
            lives.sleep(level)
        elif event < 0.92:
            lives.wake_up()
        elif event < 0.96:
            lives.load_adapter(number, evicts=bool(random.randrange(2)))
        else:
            lives.reload(others=bool(random.randrange(2)))
    lives.wake_up()
    lives.add([5, 6], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), None)
    lives.reload(others=True)  # refused, and nothing has changed
    lives.sleep(1)
    lives.drain()
    lives.reload(others=False)
    for level in lives.kind.levels:
        lives.sleep(level)
        lives.add([5], SamplingParams(), None)
        lives.wake_up()
        lives.add([*PREFIXES[0], 5], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), 0)
        lives.drain()


def test_an_engine_that_sleeps_answers_as_one_that_does_not(models: Models) -> None:
    with two_lives(KINDS["a step ahead"], models) as lives:
        live(lives, Random(1), 40)
        assert lives.seen["level 1"] and lives.seen["level 2"] and lives.seen["refused"] >= 2
        assert lives.seen["finished"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_engine_that_sleeps_answers_as_one_that_does_not(name: str, models: Models) -> None:
    """With quantised weights, adapters that come and go, drafts of both kinds, and layers that keep states."""
    with two_lives(KINDS[name], models) as lives:
        live(lives, Random(2), 120)
        assert all(lives.seen[f"level {level}"] >= 2 for level in KINDS[name].levels)
        assert lives.seen["no sleep"] and lives.seen["refused"] and lives.seen["finished"] > 10
        stats = lives.sleeper.engine.stats
        assert stats.num_prefix_hits and stats.num_free_blocks == stats.num_blocks
