"""A mode says whether options count and whether numbers are probabilities."""

from __future__ import annotations

import pytest
import torch

from piecegraph.errors import ConfigError
from piecegraph.runner.common.logprobs_mode import LogprobsMode
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.sampling.batch_sampler import Sampler


def test_parse_accepts_a_value_or_a_mode() -> None:
    for mode in LogprobsMode:
        assert LogprobsMode.parse(mode.value) is LogprobsMode.parse(mode) is mode
    with pytest.raises(ConfigError, match=r"logprobs_mode='raw_logprob' is unknown\. Did you mean 'raw_logprobs'"):
        LogprobsMode.parse("raw_logprob")
    with pytest.raises(ConfigError, match="logprobs_mode=None is unknown"):
        LogprobsMode.parse(None)


@pytest.mark.parametrize("mode", LogprobsMode)
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_each_mode_returns_its_values(mode: LogprobsMode, temperature: float) -> None:
    """Processed values describe the distribution that tokens are sampled from: with biases, temperature and top_k."""
    sampler = Sampler(max_num_reqs=2, max_model_len=8, vocab_size=6, device="cpu", logprobs_mode=mode)
    params = SamplingParams(temperature=temperature, logit_bias={0: 9.0}, top_k=2, logprobs=-1, seed=1)
    sampler.add_request(1, params, seed=1, prompt_len=1, stop_token_ids=(), bad_words=())
    sampler.apply_staged_writes()
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.0, -1.0]])
    made = sampler.sample(
        logits,
        rows=[1],
        idx_mapping=torch.tensor([1], dtype=torch.int32),
        positions=torch.tensor([1], dtype=torch.int32),
        token_ids=torch.zeros(2, 8, dtype=torch.int32),
    )
    expected = logits.clone()
    if mode.is_processed:
        expected[0, 0] += 9.0
        if temperature:
            expected[0, [1, 2, 4, 5]] = -torch.inf  # out by top_k, which greedy requests pass by
            expected /= temperature
    if mode.is_normalized:
        expected = expected.log_softmax(-1)
    assert made.logprobs is not None
    token_ids, values, ranks = made.logprobs
    torch.testing.assert_close(values, expected.gather(1, token_ids.long()))
    assert ranks.tolist() == [int((expected >= expected[0, made.token_ids[0]]).sum())]
