"""The error for a piece that could not be compiled, with what usually helps."""

from __future__ import annotations

from piecegraph.errors import PieceCompileFailed


def piece_failed(index: int, num_nodes: int, reason: str) -> PieceCompileFailed:
    """`reason` is the compiler's own text; its first lines are kept."""
    advice = "Run with compiler='eager' to go on without Inductor, and report the piece (dump_dir= writes it)."
    if "InvalidCxxCompiler" in reason or "No working C++ compiler" in reason:
        advice = (
            "Install a C++ compiler (Debian: apt-get install g++) or name one in CXX; or run with compiler='eager'."
        )
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return PieceCompileFailed(
        f"Inductor failed on unique piece {index} ({num_nodes} nodes): {' '.join(lines[:3])[:600]}. {advice}"
    )
