"""The rates of a device where a test has no use for them as figures: measuring them takes a second or more."""

from __future__ import annotations

import pytest

from piecegraph.tools.bench.measure import ceilings


def assume_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each measured run take a microsecond, so that floors lie below all that a test measures."""
    monkeypatch.setattr(ceilings, "BEYOND_CACHES", 1 << 20)
    monkeypatch.setattr(ceilings, "best_seconds", lambda run, device, repeats=20: 1e-6)
