"""Where the drafts of the next step come from."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PromptLookup(NamedTuple):
    """The verification itself drafts, by `propose_ngrams`, and writes the drafts behind the requests' tokens."""

    shortest: int  # the fewest last tokens that are looked up
    longest: int  # the most


class DraftModel(NamedTuple):
    """A model drafts after the verification, which says for which requests and how many."""

    num_slots: torch.Tensor  # [rows] int32: how many tokens have a slot in the cache, by state row
    draft_rows: torch.Tensor  # [max_num_reqs] int32: the state rows to draft for, -1 for others; written


DraftSource = PromptLookup | DraftModel
