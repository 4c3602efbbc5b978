"""Every exception piecegraph raises on bad input or a failed phase.

PiecegraphError
├── UsageError                 a call that cannot mean anything (exit code 2)
├── ConfigError                a bad value, or an unknown name (exit code 3)
│   ├── SplitOpNotFound        no such op is registered
│   ├── SplitOpUnused          the op exists, but not in this graph
│   └── KeyFactorError         a factor of a cache key that has no canonical form; names its path
├── ModelError                 a model that cannot be loaded or run (exit code 3)
│   ├── ModelNotFound
│   ├── CheckpointError        corrupt, missing or unexpected tensors
│   └── UnsupportedModel       says which part of the model cannot work
├── RequestError               a prompt or sampling parameter out of range (exit code 3)
├── OutOfMemory                (exit code 4)
├── CompileError               (exit code 5)
│   ├── GraphBreak             the model is not one graph; names the line
│   ├── SizeSpecialized        a dynamic dim became a constant; says by what
│   ├── UnknownGuard           Dynamo guarded on something we cannot vouch for
│   ├── PassFailed             a pass raised or broke the graph, under strict
│   ├── PassExpectation        a pass matched more or less often than `expect` says
│   ├── PieceCompileFailed     Inductor (or its C++ compiler) failed on a piece
│   ├── InputMismatch          a call does not fit what was traced
│   └── NotCompiled            asked for a report before anything was traced
├── CaptureError               (exit code 5)
│   └── GraphNotCaptured
├── VerificationError          (exit code 6)
│   └── SelfcheckFailed        a piece, or a replay, computes what the model does not
└── CacheError                 the cache cannot do what was asked; a compiler goes on uncached (exit code 1)
    ├── UntrustedCache         a folder or key file others could have written; says what mends it
    └── ArchiveRefused         an archive that is damaged, unsigned, or says what none of ours says

Bad bytes in a cache that is to be trusted are no error: they are a miss, and what they held is compiled again.
An invariant of ours is an `assert` with a message, never one of these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PiecegraphError(Exception):
    """Base of all; `exit_code` is what the command line returns for it."""

    exit_code = 1


class UsageError(PiecegraphError):
    exit_code = 2


class ConfigError(PiecegraphError):
    exit_code = 3


class SplitOpNotFound(ConfigError):
    pass


class SplitOpUnused(ConfigError):
    pass


class KeyFactorError(ConfigError):
    pass


class ModelError(PiecegraphError):
    exit_code = 3


class ModelNotFound(ModelError):
    pass


class CheckpointError(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class RequestError(PiecegraphError, ValueError):
    exit_code = 3


class OutOfMemory(PiecegraphError):
    exit_code = 4


class CompileError(PiecegraphError):
    exit_code = 5


class GraphBreak(CompileError):
    pass


class SizeSpecialized(CompileError):
    pass


class UnknownGuard(CompileError):
    pass


class PassFailed(CompileError):
    pass


class PassExpectation(CompileError):
    pass


class PieceCompileFailed(CompileError):
    pass


class InputMismatch(CompileError, ValueError):
    pass


class NotCompiled(CompileError):
    pass


class CaptureError(PiecegraphError):
    exit_code = 5


class GraphNotCaptured(CaptureError, KeyError):
    def __str__(self) -> str:  # KeyError would print the repr of the message
        return Exception.__str__(self)


class VerificationError(PiecegraphError):
    exit_code = 6


class SelfcheckFailed(VerificationError):
    pass


class CacheError(PiecegraphError):
    pass


class UntrustedCache(CacheError):
    pass


class ArchiveRefused(CacheError):
    pass


def did_you_mean(unknown: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the nearest known name, else the known names, sorted, while they are few."""
    names = sorted(known)
    near = difflib.get_close_matches(unknown, names, n=1)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" Known: {', '.join(names)}." if 0 < len(names) <= 40 else ""
