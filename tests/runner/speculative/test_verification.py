"""Which rows a step verifies, which drafts it accepts, and that sampling with drafts is sampling without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.sampling.batch_sampler import Sampler
from piecegraph.runner.sampling.gumbel_sample import gumbel_sample
from piecegraph.runner.sampling.options.protocol import SamplingBatch
from piecegraph.runner.speculative.common.verified_rows import VerifiedRows
from piecegraph.runner.speculative.verification import (
    Decision,
    decide,
    lay_out_rows,
    record_decision,
    write_behind,
)

MAX_DRAFTS = 2


def empty_rows(num_reqs: int, num_drafts: int = MAX_DRAFTS) -> VerifiedRows:
    num_logits = num_reqs * (1 + num_drafts)
    return VerifiedRows(
        first_rows=torch.zeros(num_reqs + 1, dtype=torch.int64),
        logits_indices=torch.full((num_logits,), 99),
        idx_mapping=torch.full((num_logits,), 99, dtype=torch.int32),
        positions=torch.full((num_logits,), 99, dtype=torch.int32),
        num_drafts=torch.full((num_reqs,), 99),
    )


class Step:
    """Four requests and padding: one that verifies two drafts, a part of a prompt, the end of a prompt, one that was
    given rows for two drafts and has one."""

    idx_mapping = torch.tensor([3, 0, 2, 1, -1], dtype=torch.int32)
    query_start_loc = torch.tensor([0, 3, 7, 8, 11, 11], dtype=torch.int32)
    prefill_lens = torch.tensor([9, 4, 6, 5], dtype=torch.int32)  # by state row
    num_computed = torch.tensor([2, 4, 5, 7], dtype=torch.int32)
    num_proposed = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    positions = torch.tensor([7, 8, 9, 2, 3, 4, 5, 5, 4, 5, 6, 0])
    input_ids = torch.tensor([50, 51, 52, 60, 61, 62, 63, 70, 80, 81, 82, 0])
    seq_lens = torch.tensor([10, 6, 6, 7, 0], dtype=torch.int32)

    def rows(self) -> VerifiedRows:
        rows = empty_rows(5)
        lay_out_rows(
            rows,
            idx_mapping=self.idx_mapping,
            query_start_loc=self.query_start_loc,
            positions=self.positions,
            prefill_lens=self.prefill_lens,
            num_computed_tokens=self.num_computed,
            num_proposed=self.num_proposed,
        )
        return rows

    def decide(self, drawn: list[int]) -> Decision:
        return decide(
            torch.tensor(drawn),
            self.rows(),
            max_drafts=MAX_DRAFTS,
            idx_mapping=self.idx_mapping,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            input_ids=self.input_ids,
            prefill_lens=self.prefill_lens,
        )


def test_a_request_has_a_row_for_each_draft_and_one_more() -> None:
    rows = Step().rows()
    assert rows.first_rows.tolist() == [0, 3, 4, 5, 8, 8]
    assert rows.logits_indices.tolist() == [0, 1, 2, 6, 7, 8, 9, 10] + [0] * 7
    assert rows.idx_mapping.tolist() == [3, 3, 3, 0, 2, 1, 1, 1] + [-1] * 7
    assert rows.positions.tolist() == [8, 9, 10, 6, 6, 5, 6, 7] + [0] * 7
    assert rows.num_drafts.tolist() == [2, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("drawn", "first", "last"),
    [
        ([51, 52, 5, 0, 7, 81, 82, 9], [51, 52, 5], [81, 82]),  # all accepted; the second draft of the last is none
        ([51, 4, 5, 0, 7, 8, 82, 9], [51, 4], [8]),
        ([4, 52, 5, 0, 7, 81, 3, 9], [4], [81, 3]),
    ],
)
def test_tokens_count_up_to_the_first_that_is_not_the_draft(
    drawn: list[int], first: list[int], last: list[int]
) -> None:
    decision = Step().decide(drawn)
    counts = decision.num_tokens.tolist()
    assert [tokens[:n] for tokens, n in zip(decision.tokens.tolist(), counts, strict=True)][:4] == [
        first,
        [],
        [7],
        last,
    ]
    assert decision.first[:4].tolist() == [8, 6, 6, 5]


def test_a_record_has_the_new_tokens_and_what_is_computed() -> None:
    step = Step()
    tokens, computed = torch.zeros(4, 10, dtype=torch.int32), step.num_computed.clone()
    decision = step.decide([51, 52, 5, 0, 7, 8, 82, 9])
    for _ in range(2):  # idempotent
        record_decision(decision, token_ids=tokens, num_computed_tokens=computed)
        assert tokens[3].tolist() == [0] * 8 + [51, 52], "the third is behind the longest text"
        assert tokens[0].tolist() == [0] * 10
        assert tokens[2].tolist() == [0] * 6 + [7, 0, 0, 0]
        assert tokens[1].tolist() == [0] * 5 + [8, 0, 0, 0, 0]
        assert computed.tolist() == [6, 5, 6, 10]


def test_a_step_of_padding_writes_nothing() -> None:
    step = Step()
    step.idx_mapping = torch.full((5,), -1, dtype=torch.int32)
    tokens, computed = torch.full((4, 10), 7, dtype=torch.int32), step.num_computed.clone()
    record_decision(step.decide([1] * 15), token_ids=tokens, num_computed_tokens=computed)
    assert bool((tokens == 7).all()) and torch.equal(computed, step.num_computed)


def test_writes_of_rows_without_any_change_nothing() -> None:
    table = torch.arange(12, dtype=torch.int32).view(2, 6)
    expected = table.clone()
    expected[1, 4:] = torch.tensor([40, 41])
    write_behind(
        table, torch.tensor([0, 1]), torch.tensor([3, 4]), torch.tensor([[9, 9, 9], [40, 41, 42]]), torch.tensor([0, 3])
    )
    assert torch.equal(table, expected)


VOCAB_SIZE = 12
NUM_DRAWS = 50_000
MIXES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "top-k and top-p": {"top_k": 6, "top_p": 0.85},
    "min-p and bias": {"min_p": 0.1, "logit_bias": {3: 2.0, 5: -1.0}},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "bad words and allowed tokens": {"bad_words": ["two"], "allowed_token_ids": [1, 2, 3, 4, 6, 8]},
}
LAST_PROMPT_TOKENS = [4, 2, 6]


BAD_WORDS = [(2, 6, 8), (2, 6, 1, 4), (2, 6, 2, 4), (2, 6, 3, 4)]
"""The tokens of the bad words of the last mix: after the prompt's `[2, 6]`, 8 is forbidden, then 4 is."""


def drawn_with_drafts(params: SamplingParams, draft: int, logits: torch.Tensor) -> Decision:
    """`NUM_DRAWS` requests with one prompt and one draft, each with its own seed.

    `logits` `[2, vocab_size]` are the target's after the prompt, and after the draft.
    """
    num_reqs, num_rows, prompt_len = NUM_DRAWS, 2, len(LAST_PROMPT_TOKENS)
    sampler = Sampler(max_num_reqs=1, max_model_len=8, vocab_size=VOCAB_SIZE, device="cpu")
    bad_words = BAD_WORDS if params.bad_words else []
    sampler.add_request(0, params, seed=1, prompt_len=1, stop_token_ids=(), bad_words=bad_words)
    sampler.apply_staged_writes()
    known = torch.tensor([[*LAST_PROMPT_TOKENS, draft, 0]], dtype=torch.int32)
    positions = torch.arange(prompt_len, prompt_len + num_rows, dtype=torch.int32)
    batch = SamplingBatch(
        rows=[0] * num_rows,
        idx_mapping=torch.zeros(num_rows, dtype=torch.int32),
        positions=positions,
        token_ids=known,
        temperature=sampler.temperature,
    )
    processed = sampler.process(logits, batch)

    requests = torch.arange(num_reqs, dtype=torch.int32)
    drawn = gumbel_sample(
        processed.repeat(num_reqs, 1),
        idx_mapping=requests.repeat_interleave(num_rows),
        temperature=sampler.temperature.repeat(num_reqs),
        seeds=10**6 + torch.arange(num_reqs),
        positions=positions.repeat(num_reqs),
    )
    rows = empty_rows(num_reqs, 1)
    torch.arange(0, num_rows * num_reqs + 1, num_rows, out=rows.first_rows)
    rows.num_drafts.fill_(1)
    return decide(
        drawn,
        rows,
        max_drafts=1,
        idx_mapping=requests,
        query_start_loc=torch.arange(0, num_rows * num_reqs + 1, num_rows, dtype=torch.int32),
        seq_lens=torch.full((num_reqs,), prompt_len + num_rows - 1, dtype=torch.int32),
        input_ids=torch.tensor([LAST_PROMPT_TOKENS[-1], draft]).repeat(num_reqs),
        prefill_lens=torch.full((num_reqs,), prompt_len, dtype=torch.int32),
    )


def target(params: SamplingParams, before: list[int], logits: torch.Tensor) -> torch.Tensor:
    """The distribution of the token after `before` in float64, from the definitions of the options alone."""
    scores = logits.double().clone()
    seen, output = set(before), before[1:]
    for token in seen:
        scores[token] = (
            scores[token] / params.repetition_penalty
            if scores[token] > 0
            else scores[token] * params.repetition_penalty
        )
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    if params.allowed_token_ids is not None:
        out = [token for token in range(VOCAB_SIZE) if token not in params.allowed_token_ids]
        scores[out] = -torch.inf
    for *begin, last in BAD_WORDS if params.bad_words else []:
        if output[len(output) - len(begin) :] == begin:
            scores[last] = -torch.inf
    probabilities = (scores / params.temperature).softmax(-1)
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    order = probabilities.argsort(descending=True)
    if params.top_k:
        probabilities[order[params.top_k :]] = 0
        probabilities /= probabilities.sum()
    reached = probabilities[order].cumsum(0) - probabilities[order]
    probabilities[order[reached >= params.top_p]] = 0
    return probabilities / probabilities.sum()


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Of a chi-square test that `counts` come from the distribution `expected`; cells that cannot occur must be 0."""
    cells = expected > 0
    assert int(counts[~cells].sum()) == 0, "a token was drawn that the options forbid"
    wanted = expected[cells] * counts.sum()
    statistic = ((counts[cells] - wanted) ** 2 / wanted).sum()
    degrees = torch.tensor((int(cells.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


@pytest.mark.parametrize("mix", MIXES)
def test_sampling_with_drafts_has_the_targets_distribution(mix: str) -> None:
    """The first token, and the second after each draft that was accepted, over 50,000 draws."""
    params = SamplingParams(max_tokens=4, **MIXES[mix])
    generator = torch.Generator().manual_seed(len(mix))
    logits = torch.randn(2, VOCAB_SIZE, generator=generator) * 1.5
    first = target(params, LAST_PROMPT_TOKENS, logits[0])
    draft = int(first.argmax())
    decision = drawn_with_drafts(params, draft, logits)
    assert p_value(torch.bincount(decision.tokens[:, 0], minlength=VOCAB_SIZE), first) > 0.001
    accepted = decision.tokens[decision.num_tokens == 2]
    assert abs(len(accepted) / NUM_DRAWS - float(first[draft])) < 0.015, "acceptance is the draft's probability"
    assert bool((accepted[:, 0] == draft).all())
    second = target(params, [*LAST_PROMPT_TOKENS, draft], logits[1])
    assert p_value(torch.bincount(accepted[:, 1], minlength=VOCAB_SIZE), second) > 0.001


def test_a_draft_that_the_options_forbid_is_never_accepted() -> None:
    params = SamplingParams(max_tokens=4, **MIXES["bad words and allowed tokens"])
    for forbidden in (BAD_WORDS[0][-1], 5):
        decision = drawn_with_drafts(params, forbidden, torch.zeros(2, VOCAB_SIZE))
        assert bool((decision.num_tokens == 1).all())


def test_a_wrong_rule_fails_the_test() -> None:
    """Accepting every draft, for one, is seen."""
    counts = torch.full((4,), 12_500) + torch.tensor([400, -400, 0, 0])
    assert p_value(counts, torch.full((4,), 0.25, dtype=torch.float64)) < 0.001


def test_block_verification_of_drafts_without_chance_accepts_as_many() -> None:
    """Algorithm 2 of Sun et al. (2024) with drafts whose own probability is 1: exactly i are accepted as by one after
    the other, with p_i - p_(i+1) for the products p of the target's probabilities."""
    generator = torch.Generator().manual_seed(0)
    for num_drafts in (1, 2, 5):
        target = torch.rand(num_drafts, dtype=torch.float64, generator=generator).tolist()  # of each draft
        products = [1.0]
        for one in target:
            products.append(min(products[-1] * one / 1.0, 1.0))
        accepts = []  # h_i of the algorithm, from i = 1
        for i in range(1, num_drafts):
            rest = products[i] * (1 - target[i])  # the sum of max(p_i M_b(x) - M_s(x), 0) over all tokens but the draft
            accepts.append(rest / (rest + 1 - products[i]))
        accepts.append(products[-1])
        none_later = 1.0
        for i in range(num_drafts, 0, -1):
            exactly = accepts[i - 1] * none_later
            one_by_one = products[i] - (products[i + 1] if i < num_drafts else 0.0)
            assert exactly == pytest.approx(one_by_one, abs=1e-12)
            none_later *= 1 - accepts[i - 1]
        assert none_later == pytest.approx(1 - products[1], abs=1e-12)
