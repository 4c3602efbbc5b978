"""The draw of one token a row directly from logits, by Gumbel noise; greedy rows take the likeliest token.

The noise is a function of (request seed, position, token): the same in any batch, on any run.
"""

from __future__ import annotations

import torch

from piecegraph.runner.common.token_record import TokenRecord, record_tokens
from piecegraph.runner.sampling.kernels.cpu_gumbel_sample import gumbel_sample_on_cpu
from piecegraph.runner.sampling.philox import rand4x, randint4x

_TINY = 1e-20  # keeps log(0) away; below float32's smallest step of a uniform


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return noise `[num_reqs, vocab_size]` float32 for `seeds` and `positions`, both `[num_reqs]` int64.

    argmax(log p + noise) is a draw from p. A position's own 64-bit seed comes first
    (`randint4x(seed, position)`), then four numbers for each four tokens, `rand4x(position's seed, token // 4)`.
    """
    words = randint4x(seeds, positions)
    position_seeds = (words[0] << 32) | words[1]
    fours = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=seeds.device)
    uniform = torch.stack(rand4x(position_seeds.unsqueeze(1), fours.unsqueeze(0)), dim=-1).flatten(1)[:, :vocab_size]
    return -torch.log(-torch.log(uniform + _TINY) + _TINY)


def gumbel_sample(
    logits: torch.Tensor,
    *,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor | None = None,
    record: TokenRecord | None = None,
) -> torch.Tensor:
    """Return one token a row of `logits`: argmax(logits / temperature + Gumbel noise), or argmax(logits) if greedy.

    That is a draw from softmax(logits / temperature), which is never materialised. The noise depends on a row's
    seed and position and the token only, so neither neighbours nor the order of rows matter. Among equal
    tokens the first wins; -inf and NaN are never drawn, unless a row has nothing else: then the token is 0.

    Args:
        logits: `[num_reqs, vocab_size]` float32, float16 or bfloat16, each row contiguous.
        idx_mapping: `[num_reqs]` int32, the state row of each row; -1 is padding, whose token is 0.
        temperature: `[max_num_reqs]` float32 by state row; 0 is greedy and draws no noise.
        seeds: `[max_num_reqs]` int64 by state row.
        positions: `[num_reqs]` int32, the positions of the drawn tokens.
        out: `[num_reqs]` int64, written and returned; None: a new tensor is.
        record: requests' states, to which the tokens are added (`record_tokens`); mutated.

    On a GPU the draw waits for nothing and can be captured: the launches depend on shapes only.
    """
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.device.type == "cuda":
        from piecegraph.runner.sampling.kernels.gumbel_sample import gumbel_sample_on_gpu

        gumbel_sample_on_gpu(logits, idx_mapping.contiguous(), temperature, seeds, positions.contiguous(), out, record)
        return out
    arguments = (logits, idx_mapping, temperature, seeds, positions, out)
    if gumbel_sample_on_cpu(*arguments, record):
        return out
    gumbel_sample_reference(*arguments)
    if record is not None:
        record_tokens(record, out, idx_mapping=idx_mapping, positions=positions)
    return out


def gumbel_sample_reference(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Draw what the kernels draw, in torch. Writes `out`."""
    row = idx_mapping.long()
    is_real = row >= 0
    row = row.clamp(min=0)
    at = torch.nonzero(is_real & (temperature[row] > 0)).squeeze(1)
    scores = logits.float()
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    if len(at) > 0:
        scaled = scores[at] / temperature[row[at]].unsqueeze(1)
        noise = gumbel_noise(seeds[row[at]], positions[at].long(), logits.shape[1])
        scores = scores.index_copy(0, at, scaled + noise)
    out.copy_(scores.argmax(-1) * is_real)
