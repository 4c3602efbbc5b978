"""Many streams at once, by locust: none loses or mixes up a token, clients that go away harm nobody, memory is flat."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.serve.load.run_load import MIB, LoadResult, offline_cases, run_load, tiny_model


@pytest.mark.slow
def test_streams_under_load_equal_their_offline_answers(tmp_path: Path) -> None:
    """Twenty seconds of what docs/measurements has of ten minutes."""
    model = tiny_model(tmp_path / "model")
    cases = offline_cases(model, num_cases=32, max_tokens=24)
    result = run_load(model, cases, tmp_path, users=64, seconds=20)
    assert result.num_failures == 0 and result.num_streams > 64, result
    assert result.growth_bytes < 64 * MIB, result


def test_memory_that_grows_is_seen() -> None:
    """The growth is that from the second quarter to the last, so that a warm-up counts for nothing."""
    flat = [(float(at), 100 * MIB if at > 20 else at * MIB) for at in range(101)]
    growing = [(float(at), (100 + at) * MIB) for at in range(101)]
    assert _with(flat).growth_bytes == 0
    assert _with(growing).growth_bytes == 50 * MIB
    assert "+50.0 MiB" in str(_with(growing))


def _with(rss: list[tuple[float, int]]) -> LoadResult:
    return LoadResult(1, 0, 0, 1.0, (1.0, 1.0), (1.0, 1.0), rss)
