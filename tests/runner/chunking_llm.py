"""A tiny model loaded such that prompts of a dozen tokens come in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from piecegraph import LLM


@contextmanager
def chunking_llm(folder: Path, *, is_ahead: bool) -> Iterator[LLM]:
    """`is_ahead`: steps are scheduled before the last one's tokens are known. Nothing may run in it at the end."""
    with LLM(
        folder,
        dtype="float32",
        compiler="eager",
        max_num_seqs=7,
        num_kv_blocks=64,
        max_num_batched_tokens=7,
        async_scheduling=is_ahead,
    ) as llm:
        yield llm
        assert not llm.engine.has_unfinished
