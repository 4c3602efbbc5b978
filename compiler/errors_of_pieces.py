"""The error for a piece that could not be compiled, with what usually helps."""

from __future__ import annotations

from piecegraph.errors import PieceCompileFailed


def piece_failed(name: str, num_nodes: int, reason: str) -> PieceCompileFailed:
    """`name` is the piece, e.g. "unique piece 3"; `reason` is the compiler's own text."""
    advice = "Run with compiler='eager' to go on without Inductor, and report the piece (dump_dir= writes it)."
    if "InvalidCxxCompiler" in reason or "No working C++ compiler" in reason:
        advice = (
            "Install a C++ compiler (Debian: apt-get install g++) or name one in CXX; or run with compiler='eager'."
        )
    return PieceCompileFailed(f"Inductor failed on {name} ({num_nodes} nodes): {shortened(reason)}. {advice}")


def shortened(reason: str) -> str:
    """The first lines of a compiler's text, as one."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return " ".join(lines[:3])[:600]
