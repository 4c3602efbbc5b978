"""Any options in one batch give what each request's would alone; draws follow the exact probabilities."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.sampling import batch_sampler
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.sampling.gumbel_sample import gumbel_sample
from piecegraph.runner.sampling.logprobs import gather_logprobs
from piecegraph.runner.sampling.options.protocol import SamplingBatch
from tests.runner.no_sync import no_sync
from tests.runner.sampling.sampling_case import Case, make_sampler, plain_logits, plain_token

VOCAB = 23
TOKENS = st.integers(0, VOCAB - 1)
NUM_DRAWS = 20_000


def logits_of(num_rows: int, vocab_size: int = VOCAB, *, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def maybe(field: str, values: st.SearchStrategy[Any]) -> dict[str, Any]:
        return {field: draw(values)} if draw(st.booleans()) else {}

    params = SamplingParams(
        **maybe("temperature", st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        **maybe("top_k", st.sampled_from([1, 2, 7, 100])),
        **maybe("top_p", st.sampled_from([0.05, 0.613, 0.9])),
        **maybe("min_p", st.sampled_from([0.013, 0.31, 1.0])),
        **maybe("repetition_penalty", st.sampled_from([0.5, 1.3])),
        **maybe("frequency_penalty", st.sampled_from([-1.1, 0.7])),
        **maybe("presence_penalty", st.sampled_from([-0.9, 1.9])),
        **maybe("min_tokens", st.integers(0, 6)),
        **maybe("allowed_token_ids", st.lists(TOKENS, min_size=2, max_size=9)),
        **maybe("logit_bias", st.dictionaries(TOKENS, st.floats(-3, 3), max_size=5)),
    )
    text = st.lists(st.integers(0, 5), max_size=8)  # few tokens, so that they come again
    return Case(
        params=params,
        prompt=(3, *draw(text)),
        output=tuple(draw(text)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB + 5), max_size=3))),
        bad_words=tuple(draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=4))),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(cases(), min_size=1, max_size=6), st.randoms(use_true_random=False), st.integers(0, 10**6))
def test_a_mixed_batch_equals_one_request_after_the_other(found: list[Case], order: Random, seed: int) -> None:
    """All options at once, in any rows, between padding: what is drawn from, and the token."""
    rows = list(range(8))
    order.shuffle(rows)
    rows = [*rows[: len(found)], -1]
    batch_cases = [*found, found[0]]
    logits = logits_of(len(rows), seed=seed)
    sampler, inputs = make_sampler(batch_cases, rows, vocab_size=VOCAB)
    processed = sampler.process(logits, SamplingBatch(temperature=sampler.temperature, **inputs))
    tokens = sampler.sample(logits, **inputs).token_ids
    for i, case in enumerate(found):
        expected = plain_logits(logits[i], case)
        divisor = 1.0 if case.params.is_greedy else case.params.temperature
        np.testing.assert_allclose(processed[i].double().numpy() / divisor, expected, rtol=1e-4, atol=1e-4)
        token, margin = plain_token(logits[i], case)
        if margin > 1e-3:
            assert int(tokens[i]) == token
    assert int(tokens[-1]) == 0
    assert torch.equal(logits, logits_of(len(rows), seed=seed)), "the model's logits stay as they are"


OPTIONS: dict[str, Case] = {
    "none": Case(params=SamplingParams()),
    "temperature": Case(params=SamplingParams(temperature=0.6)),
    "high temperature": Case(params=SamplingParams(temperature=2.5)),
    "top_k": Case(params=SamplingParams(top_k=3)),
    "top_p": Case(params=SamplingParams(top_p=0.7)),
    "min_p": Case(params=SamplingParams(min_p=0.2)),
    "repetition_penalty": Case(params=SamplingParams(repetition_penalty=1.6), output=(0, 3, 3)),
    "frequency_penalty": Case(params=SamplingParams(frequency_penalty=0.8), output=(0, 3, 3)),
    "presence_penalty": Case(params=SamplingParams(presence_penalty=-1.5), output=(0, 3, 3)),
    "logit_bias": Case(params=SamplingParams(logit_bias={5: 2.0, 0: -1.0})),
    "allowed_token_ids": Case(params=SamplingParams(allowed_token_ids=[0, 5, 7])),
    "bad_words": Case(params=SamplingParams(bad_words=["x"]), output=(2, 4), bad_words=((0,), (4, 6), (2, 6, 1))),
    "min_tokens": Case(params=SamplingParams(min_tokens=2), output=(4,), stop_token_ids=(0, 6)),
    "min_tokens reached": Case(params=SamplingParams(min_tokens=1), output=(4,), stop_token_ids=(0, 6)),
    "all": Case(
        params=SamplingParams(
            temperature=1.4, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3,
            presence_penalty=0.2, logit_bias={5: 1.0}, allowed_token_ids=[0, 1, 2, 3, 5, 6, 7], min_tokens=3,
        ),
        output=(3, 2), stop_token_ids=(7,), bad_words=((2, 1),),
    ),
}  # fmt: skip

CHI_SQUARE_999 = [0, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32]
"""The 99.9 % points for 0 to 7 degrees of freedom. Seeds are fixed, so a draw that passes always passes."""


@pytest.mark.parametrize("name", OPTIONS)
def test_draws_follow_the_distribution(name: str) -> None:
    """Chi-square against exact probabilities over many seeds; what is out is never drawn."""
    case = OPTIONS[name]
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -2.0])
    sampler, inputs = make_sampler([case], [0], vocab_size=8, max_num_reqs=NUM_DRAWS)
    for row in range(1, NUM_DRAWS):
        sampler.add_request(
            row, case.params, seed=row, prompt_len=2, stop_token_ids=case.stop_token_ids, bad_words=case.bad_words
        )
    sampler.apply_staged_writes()
    tokens = sampler.sample(
        logits.expand(NUM_DRAWS, -1),
        rows=range(NUM_DRAWS),
        idx_mapping=torch.arange(NUM_DRAWS, dtype=torch.int32),
        positions=inputs["positions"].expand(NUM_DRAWS),
        token_ids=inputs["token_ids"][:1].expand(NUM_DRAWS, -1),
    ).token_ids
    probabilities = np.exp(plain_logits(logits, case))
    expected = probabilities / probabilities.sum() * NUM_DRAWS
    counts = np.bincount(tokens.numpy(), minlength=8)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert chi_square < CHI_SQUARE_999[int(possible.sum()) - 1]


def test_options_change_the_distributions_above() -> None:
    """Each case differs from plain sampling, so that the test of its distribution can fail."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -2.0])
    plain = plain_logits(logits, OPTIONS["none"])
    same = [name for name, case in OPTIONS.items() if np.array_equal(plain_logits(logits, case), plain)]
    assert same == ["none", "min_tokens reached"]


MIXED = [dataclasses.replace(case, seed=i + 2**40) for i, case in enumerate(OPTIONS.values())]


def tokens_of(picked: list[Case], rows: list[int], logits: torch.Tensor) -> list[int]:
    sampler, inputs = make_sampler(picked, rows, vocab_size=logits.shape[1], max_num_reqs=len(MIXED) + 1)
    return [int(token) for token in sampler.sample(logits, **inputs).token_ids]


def test_a_request_draws_the_same_in_any_batch() -> None:
    """Together, backwards in other rows, alone, between padding: seed and position decide."""
    logits, rows = logits_of(len(MIXED), 50), list(range(len(MIXED)))
    together = tokens_of(MIXED, rows, logits)
    assert tokens_of(MIXED[::-1], rows, logits.flip(0))[::-1] == together
    assert [tokens_of([case], [3], logits[i : i + 1])[0] for i, case in enumerate(MIXED)] == together
    padded = tokens_of([MIXED[4], MIXED[0], MIXED[8]], [1, -1, 0], logits[[4, 0, 8]])
    assert padded == [together[4], 0, together[8]]


def test_a_preempted_request_goes_on_as_before() -> None:
    """Its row is taken by another meanwhile, and it comes back to a third, with what it has generated."""
    logits, case = logits_of(2, 50), dataclasses.replace(OPTIONS["all"], seed=9)
    sampler, inputs = make_sampler([case, case], [0, -1], vocab_size=50)
    token = int(sampler.sample(logits, **inputs).token_ids[0])
    sampler.remove_request(0)
    other = Case(params=SamplingParams(allowed_token_ids=[1], logprobs=3), prompt=(9, 9, 9))
    _, inputs = make_sampler([other, case], [0, 5], vocab_size=50, sampler=sampler)
    assert sampler.sample(logits[[1, 0]], **inputs).token_ids.tolist() == [1, token]


def test_seeds_and_positions_draw_differently() -> None:
    logits = torch.zeros(64, 1000)
    sampler = Sampler(max_num_reqs=64, max_model_len=64, vocab_size=1000, device="cpu")
    for row in range(64):
        sampler.add_request(row, SamplingParams(), seed=row // 2, prompt_len=1, stop_token_ids=(), bad_words=())
    sampler.apply_staged_writes()
    tokens = sampler.sample(
        logits,
        rows=range(64),
        idx_mapping=torch.arange(64, dtype=torch.int32),
        positions=torch.arange(64, dtype=torch.int32) % 2,
        token_ids=torch.zeros(64, 64, dtype=torch.int32),
    ).token_ids
    assert len(set(tokens.tolist())) > 55


def test_a_batch_without_options_draws_from_the_models_own_logits() -> None:
    """Without options the model's own logits go to the draw, of whatever dtype; with some, a float32 copy does."""
    plain = [Case(params=SamplingParams(temperature=t)) for t in (0.0, 0.7)]
    greedy = Case(params=SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.1))
    logits = logits_of(3).to(torch.bfloat16)
    sampler, inputs = make_sampler([*plain, greedy], [0, 1, 2], vocab_size=VOCAB)
    batch = SamplingBatch(temperature=sampler.temperature, **inputs)
    assert sampler.is_plain([0, 1, 2, -1])
    assert sampler.process(logits, batch) is logits
    make_sampler([Case(params=SamplingParams(top_k=3))], [2], vocab_size=VOCAB, sampler=sampler)
    assert not sampler.is_plain([0, 2]) and sampler.is_plain([0, 1])
    assert sampler.process(logits, batch).dtype == torch.float32
    sampler.remove_request(2)
    assert sampler.is_plain([0, 1, 2])


def test_half_precision_logits_are_drawn_from_in_float32() -> None:
    logits = logits_of(len(MIXED), 50).to(torch.bfloat16)
    rows = list(range(len(MIXED)))
    assert tokens_of(MIXED, rows, logits) == tokens_of(MIXED, rows, logits.float())


def test_log_probabilities_are_those_of_the_model() -> None:
    """Before any option; as many as who wants the most asks for, -1 being all of them."""
    logits = logits_of(3)
    wanting = [
        Case(params=SamplingParams(temperature=3.0, logprobs=2, logit_bias={4: 9.0})),
        Case(params=SamplingParams(logprobs=0)),
        Case(params=SamplingParams()),
    ]
    sampler, inputs = make_sampler(wanting, [4, 1, 0], vocab_size=VOCAB)
    assert sampler.num_logprobs([1, 0]) == 0 and sampler.num_logprobs([0, -1]) is None
    output = sampler.sample(logits, **inputs)
    assert output.logprobs is not None
    assert output.logprobs.token_ids.shape == (3, 3)
    assert torch.equal(output.logprobs.token_ids[:, 0].long(), output.token_ids)
    expected = logits.log_softmax(-1).gather(1, output.logprobs.token_ids.long())
    torch.testing.assert_close(output.logprobs.logprobs, expected)
    everything = Case(params=SamplingParams(logprobs=-1))
    sampler, inputs = make_sampler([everything] * 3, [0, 1, 2], vocab_size=VOCAB)
    full = sampler.sample(logits, **inputs).logprobs
    assert full is not None and full.token_ids.shape == (3, VOCAB + 1)


@pytest.mark.parametrize("is_plain", [False, True])
def test_parts_run_the_same_kernels_as_sample(is_plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same options, draw and log probabilities over the same dtypes, in any order; logits stay as they are."""
    params = (
        SamplingParams(temperature=0.7)
        if is_plain
        else SamplingParams(
            temperature=0.7, top_k=3, min_p=0.1, repetition_penalty=1.3, logit_bias={4: 9.0}, logprobs=2
        )
    )
    sampler, inputs = make_sampler([Case(params=params)] * 2, [1, 0], vocab_size=VOCAB)
    logits = logits_of(2).to(torch.bfloat16)
    before = logits.clone()
    ran: list[tuple[Any, ...]] = []

    def recorded(name: str, run: Any, *numbers: int) -> Any:
        """`run`, which leaves its name, the dtype of its logits and arguments of these numbers."""

        def recording(x: torch.Tensor, *rest: Any, **how: Any) -> Any:
            ran.append((name, x.dtype, *(rest[number] for number in numbers)))
            return run(x, *rest, **how)

        return recording

    for option in sampler._options:
        monkeypatch.setattr(option, "apply", recorded(type(option).__name__, option.apply))
    monkeypatch.setattr(batch_sampler, "gumbel_sample", recorded("draw", gumbel_sample))
    gather = recorded("log probabilities", gather_logprobs, 1)
    monkeypatch.setattr(batch_sampler, "gather_logprobs", gather)
    sampler.sample(logits, **inputs)
    whole = sorted(ran, key=str)
    ran.clear()
    for part in reversed(sampler.parts(logits, SamplingBatch(temperature=sampler.temperature, **inputs))):
        part()
    assert sorted(ran, key=str) == whole and len(whole) == (1 if is_plain else 5)
    assert torch.equal(logits, before)


def test_addresses_for_graphs_never_change() -> None:
    """A captured step reads temperatures and seeds where they were."""
    sampler, _ = make_sampler([OPTIONS["all"]], [0], vocab_size=VOCAB)
    before = sampler.temperature.data_ptr(), sampler.seeds.data_ptr()
    make_sampler([dataclasses.replace(OPTIONS["top_k"], seed=2**62 + 1)], [7], vocab_size=VOCAB, sampler=sampler)
    assert (sampler.temperature.data_ptr(), sampler.seeds.data_ptr()) == before
    assert sampler.seeds.tolist() == [0] * 7 + [2**62 + 1]
    assert sampler.temperature[0].item() == pytest.approx(1.4)


@pytest.mark.gpu
def test_a_large_mixed_batch_waits_for_nothing_on_the_gpu() -> None:
    """Every option in a batch of 256 at a real vocabulary, bfloat16: no synchronisation, and the CPU's tokens."""
    vocab_size, num_reqs = 151_936, 256
    some = [
        dataclasses.replace(case, params=dataclasses.replace(case.params, logprobs=5 if i % 2 else None))
        for i, case in enumerate(MIXED)
    ]
    picked = [dataclasses.replace(some[i % len(some)], seed=i) for i in range(num_reqs)]
    rows = torch.randperm(num_reqs, generator=torch.Generator().manual_seed(0)).tolist()
    rows[77] = -1
    logits = logits_of(num_reqs, vocab_size).to(torch.bfloat16)
    logits[:, :8] += 6  # the tokens that options speak of are likely ones
    on_gpu = logits.cuda()
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "max_num_reqs": num_reqs}
    sampler, inputs = make_sampler(picked, rows, device="cuda", **sizes)
    sampler.sample(on_gpu, **inputs)  # compiles
    torch.cuda.synchronize()
    with no_sync():
        for i, row in enumerate(rows[:20]):  # as they were
            sampler.add_request(
                row, picked[i].params, seed=i, prompt_len=2, stop_token_ids=picked[i].stop_token_ids,
                bad_words=picked[i].bad_words,
            )  # fmt: skip
        sampler.apply_staged_writes()
        output = sampler.sample(on_gpu, **inputs)
        sampler.remove_request(rows[0])
    assert int(output.token_ids[77]) == 0
    assert output.logprobs is not None and output.logprobs.logprobs.shape == (num_reqs, 6)
    few = 2 * len(some)  # the reference takes its time
    sampler, inputs = make_sampler(picked[:few], rows[:few], **sizes)
    expected = sampler.sample(logits[:few], **inputs)
    assert (output.token_ids[:few].cpu() == expected.token_ids).sum() >= few - 1, "but for a near tie"
