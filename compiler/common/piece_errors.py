"""The error for a piece that could not be compiled, with what usually helps."""

from __future__ import annotations

import re

from piecegraph.errors import PieceCompileFailed


def piece_failed(name: str, num_nodes: int, reason: str) -> PieceCompileFailed:
    """Return the error for a piece that Inductor failed on, with advice.

    `name` is the piece, e.g. "unique piece 3"; `reason` is the compiler's own text.
    """
    advice = (
        "Run without strict=True, and this piece runs eagerly; or with compiler='eager', to go on without Inductor. "
        "Report the piece (dump_dir= writes it)."
    )
    if _lacks_a_compiler(reason):
        advice = f"{_INSTALL}; or run with compiler='eager'."
    return PieceCompileFailed(f"Inductor failed on {name} ({num_nodes} nodes): {shortened(reason)}. {advice}")


def eager_reason(reason: str) -> str:
    """Return the reason for running a piece eagerly, from the compiler's own text `reason`."""
    advice = f". {_INSTALL}" if _lacks_a_compiler(reason) else ""
    return f"Inductor failed: {shortened(reason)}{advice}"


def eager_note(reason: str) -> str:
    """Return the note in a report for a piece that runs eagerly because of `reason`."""
    return f"runs eagerly: {reason}"


def is_repeatable_failure(reason: str) -> bool:
    """Return whether this version of Inductor would fail on the piece again, because the error is of its own code.

    A missing compiler, a process that died or a full disk may be mended by the next start.
    """
    return _OF_THE_PIECE.match(reason) is not None and not _lacks_a_compiler(reason)


_OF_THE_PIECE = re.compile(
    r"(?:(?:InductorError|BackendCompilerFailed|LoweringException|InternalTorchDynamoError):\s+)*"
    r"(?:GuardOnDataDependentSymNode|PendingUnbackedSymbolNotFound|LoweringException|UnsupportedOperatorException"
    r"|MissingOperator\w*|NotImplementedError|AssertionError|TypeError|KeyError|IndexError|AttributeError|ValueError)\b"
)

_INSTALL = "Install a C++ compiler (Debian: apt-get install g++) or name one in CXX"


def _lacks_a_compiler(reason: str) -> bool:
    return "InvalidCxxCompiler" in reason or "No working C++ compiler" in reason


def shortened(reason: str) -> str:
    """Return the first three lines of a compiler's text as one line of at most 600 characters."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return " ".join(lines[:3])[:600]
