"""How much tests draw that draw at random: CI draws one round, `make test-slow TEST_ROUNDS=3` three."""

from __future__ import annotations

import os

ROUNDS = int(os.environ.get("TEST_ROUNDS") or "1")
