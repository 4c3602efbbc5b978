"""One call of `piecegraph::varlen_attention` with its arguments by name, and the batch that it attends over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol

import torch

VARLEN_OP = "piecegraph::varlen_attention"

SCHEMA = (
    "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, float scale, bool is_causal, "
    "int window, float softcap, Tensor? sinks, Tensor? slopes, float slope_scale, str? unsupported, str layer) -> ()"
)
# As in `interface/op_call.py`: `layer` is the only argument in which equal layers differ, and `unsupported` carries
# the reason for which a layer cannot run as data, because an exception in a trace would lose its type.


class VarlenCall(NamedTuple):
    """Attention within each sequence of a flattened batch, without a cache; running it writes `out`.

    Key `j` is visible from query `i` of the same sequence unless the call is causal and `j > i`, or it has a window
    and `|i - j| >= window` (transformers' meaning). In a call that is read from a traced graph, each tensor is its
    `TensorSpec`.
    """

    query: torch.Tensor  # [num_tokens, num_q_heads, key_dim]
    key: torch.Tensor  # [num_tokens, num_kv_heads, key_dim]
    value: torch.Tensor  # [num_tokens, num_kv_heads, value_dim]
    out: torch.Tensor  # [num_tokens, num_q_heads, value_dim], contiguous, written
    scale: float
    is_causal: bool
    window: int  # 0: no window
    softcap: float  # 0.0: none
    sinks: torch.Tensor | None  # [num_q_heads]
    slopes: torch.Tensor | None  # [num_q_heads] float32 or bfloat16: linear biases by position, or none
    slope_scale: float  # of the biases
    unsupported: str | None  # the reason the layer cannot run, or None
    layer: str  # the layer's name


class EqualSequences(NamedTuple):
    """Adjacent sequences of equal length."""

    first_row: int
    num_seqs: int
    seq_len: int

    @property
    def last_row(self) -> int:
        """The row after the last one."""
        return self.first_row + self.num_seqs * self.seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenMetadata:
    """The sequences of a flattened batch; rows after the last one are padding."""

    num_tokens: int  # rows of the batch, padding included
    seq_lens: tuple[int, ...]  # on the host
    query_start_loc: torch.Tensor  # [num_seqs + 1] int32, on the device
    equal: tuple[EqualSequences, ...]  # all sequences

    @classmethod
    def of(cls, seq_lens: tuple[int, ...], query_start_loc: torch.Tensor, num_tokens: int) -> VarlenMetadata:
        """Return the metadata of a batch of these sequences, padded to `num_tokens`."""
        return cls(
            num_tokens=num_tokens,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            equal=tuple(_equal_sequences(seq_lens)),
        )

    @property
    def num_real_rows(self) -> int:
        """The number of rows that are not padding."""
        return sum(self.seq_lens)


def _equal_sequences(seq_lens: tuple[int, ...]) -> Iterator[EqualSequences]:
    groups = [(seq_len, len(list(group))) for seq_len, group in groupby(seq_lens)]
    starts = accumulate((seq_len * count for seq_len, count in groups), initial=0)
    for (seq_len, count), start in zip(groups, starts, strict=False):
        yield EqualSequences(start, count, seq_len)


class VarlenAttention(Protocol):
    """An implementation of the op."""

    def forward(self, call: VarlenCall, metadata: VarlenMetadata) -> None:
        """Write the attention of every sequence to `call.out`, and zeros to the rows of padding."""
