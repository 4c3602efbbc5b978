"""Digests over sources of this package: what was compiled by other ones is compiled again."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import piecegraph

OF_PLANS = ("*.py", "compiler/**/*.py", "passes/**/*.py", "runner/**/*.py")
"""Patterns of what a trace, and what is made of it, depends on: all but the tools and the store."""

OF_PIECES = (
    *("compiler/as_it_is.py", "compiler/compile_child.py", "compiler/cpp_libraries.py", "compiler/fake_values.py"),
    *("compiler/inductor*.py", "compiler/piece_format.py", "compiler/post_grad.py", "compiler/process_settings.py"),
    *("compiler/symbolic_sizes.py", "compiler/torch_compat.py", "passes/**/*.py"),
)
"""Patterns of what stands between a piece's graph and the code made of it."""


@functools.cache
def digest_of_own_sources(patterns: tuple[str, ...]) -> str:
    """sha256 of the files that match, hex."""
    root = Path(piecegraph.__file__).parent
    text = hashlib.sha256()
    for file in sorted({file for pattern in patterns for file in root.glob(pattern)}):
        text.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return text.hexdigest()
