"""Several tokens a request come to the host in one copy."""

from __future__ import annotations

import torch

from piecegraph.runner.output.async_output import OutputStream
from piecegraph.runner.sampling.logprobs import LogprobsTensors
from piecegraph.runner.speculative.verified_output import AsyncVerifiedOutput, VerifiedOutput, VerifiedTokens


def test_each_request_gets_its_tokens_and_their_log_probabilities() -> None:
    """The second request of the batch is a part of a prompt and has none."""
    decisions = torch.tensor([[7, 8, 0, 2, 2, 1, 30], [0, 0, 0, 0, 0, 0, 9], [5, 0, 0, 1, 0, 2, 12]]).flatten()
    values = torch.arange(5.0)
    output = AsyncVerifiedOutput(
        OutputStream(torch.device("cpu")),
        request_ids=("a", "c"),
        decisions=decisions,
        num_columns=7,
        places=[0, 2],
        first_rows=[0, 4],
        logprobs=LogprobsTensors(torch.tensor([[7], [8], [1], [2], [5]]), values.unsqueeze(1), values.int() + 1),
    ).get()
    assert isinstance(output, VerifiedOutput)
    assert output.verified == {"a": VerifiedTokens([7, 8], 2, 1, 30), "c": VerifiedTokens([5], 0, 2, 12)}
    assert {name: [row.logprobs for row in rows] for name, rows in output.logprob_rows.items()} == {
        "a": [[0.0], [1.0]],
        "c": [[4.0]],
    }
    assert len(output.token_ids) == 0
