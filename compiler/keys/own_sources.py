"""Digests of this package's sources: what other sources compiled is compiled again."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import piecegraph

PLAN_SOURCES = ("*.py", "compiler/**/*.py", "passes/**/*.py", "passes/**/*.cpp")
"""Patterns of the sources that a trace and everything made of it depend on: all but the tools and the store."""

PIECE_SOURCES = (
    "compiler/common/fake_values.py",
    "compiler/common/symbolic_sizes.py",
    "compiler/inductor/*.py",
    "compiler/rewriting/post_grad.py",
    "compiler/splitting/exact_strides.py",
    "compiler/splitting/passthrough.py",
    "compiler/splitting/piece_format.py",
    "compiler/torch_compat/process_settings.py",
    "compiler/torch_compat/versions.py",
    "compiler/workers/child.py",
    "passes/**/*.py",
    "passes/**/*.cpp",
)
"""Patterns of the sources that turn a piece's graph into code."""


@functools.cache
def digest_of_own_sources(patterns: tuple[str, ...]) -> str:
    """Return the sha256 (hex) of the names and contents of the files that match."""
    root = Path(piecegraph.__file__).parent
    text = hashlib.sha256()
    for file in sorted({file for pattern in patterns for file in root.glob(pattern)}):
        text.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return text.hexdigest()
