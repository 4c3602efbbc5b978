"""The size that a cache may have."""

from __future__ import annotations

import pytest

from piecegraph.cache.upkeep.capacity import max_cache_bytes, parse_bytes
from piecegraph.errors import ConfigError


@pytest.mark.parametrize(("text", "size"), [(None, 10 << 30), ("", 10 << 30), ("500M", 500 << 20), ("0", 0)])
def test_the_environment_decides(text: str | None, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIECEGRAPH_CACHE_MAX_SIZE", raising=False)
    if text is not None:
        monkeypatch.setenv("PIECEGRAPH_CACHE_MAX_SIZE", text)
    assert max_cache_bytes() == size


@pytest.mark.parametrize("text", ["much", "-1", "10 apples", "GiB", "1e9"])
def test_a_text_that_is_not_a_size_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_bytes(text) is None
    monkeypatch.setenv("PIECEGRAPH_CACHE_MAX_SIZE", text)
    with pytest.raises(ConfigError, match=f"PIECEGRAPH_CACHE_MAX_SIZE='{text}' is not a size like 500M or 10GiB"):
        max_cache_bytes()
