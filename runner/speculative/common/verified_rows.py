"""The rows of logits of a step that verifies drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch

NUM_COUNTS = 4
"""The columns of a step's result behind its tokens; see `verify_drafts.verify_drafts`."""


class VerifiedRows(NamedTuple):
    """The rows of logits of a step; a request has one for each draft it verifies and one more."""

    first_rows: torch.Tensor  # [max_num_reqs + 1] int64: where each request's rows begin, and the last ones end
    logits_indices: torch.Tensor  # [max_num_logits] int64: the row of the batch; 0 for padding
    idx_mapping: torch.Tensor  # [max_num_logits] int32: the state row; -1: padding
    positions: torch.Tensor  # [max_num_logits] int32: of the token that is drawn from it; 0 for padding
    num_drafts: torch.Tensor  # [max_num_reqs] int64: how many of a request's rows verify a draft that was proposed
