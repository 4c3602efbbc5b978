"""The interface of a grammar library: seven methods, so that another library is one more file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from piecegraph.runner.structured_output.params import StructuredOutputsParams

Bitmask = npt.NDArray[np.int32]
"""Allowed tokens `[num_rows, ceil(vocab_size / 32)]` int32; token t is bit t % 32 of word t // 32."""


class GrammarMatcher(Protocol):
    """The progress of one output through a grammar."""

    def copy(self) -> GrammarMatcher:
        """Return a matcher of the same grammar with the same progress."""

    def accept(self, token_ids: Sequence[int]) -> str | None:
        """Continue by the tokens; returns what is wrong if the grammar does not allow one of them, else None.

        After an error the matcher is of no more use until it is `reset`.
        """

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens that were accepted, also those that ended the output."""

    def fill_bitmask(self, bitmask: Bitmask, row: int) -> str | None:
        """Write the tokens that may come next into a row, EOS tokens where the output may end.

        Returns what is wrong if they cannot be computed, as beyond a limit of the library, else None.
        """

    def is_stopped(self) -> bool:
        """Return whether nothing but an EOS token may come next, or an EOS token has come."""

    def reset(self) -> None:
        """Go back to the start of the output."""


class StructuredOutputBackend(Protocol):
    """A library that compiles grammars for one tokenizer. Called by several threads at once."""

    def compile(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """Return a matcher at the start of the output. Raises `RequestError` for what cannot be compiled."""
