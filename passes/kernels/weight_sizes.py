"""Which weights are small, for a GPU that reads 4 TB/s on 132 multiprocessors."""

from __future__ import annotations

SMALL_WEIGHT_BYTES = 16 * 2**20
"""All multiprocessors together read so much in one wave of programs."""

MIDDLE_WEIGHT_BYTES = 64 * 2**20
"""Up to so much, a linear of few rows is streamed in one wave of programs; the library reads larger ones as fast."""
