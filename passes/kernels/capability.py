"""What kernels need of a GPU, known without Triton."""

from __future__ import annotations

MIN_OVERLAP_CAPABILITY = (9, 0)
"""The compute capability that brought programmatic dependent launch (`overlapped.py`)."""
