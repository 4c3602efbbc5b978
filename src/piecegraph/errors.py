"""The exceptions that piecegraph raises on bad input or a failed phase.

PiecegraphError
├── UsageError                 a call with arguments that exclude each other (exit code 2)
├── ConfigError                a bad value, or an unknown name (exit code 3)
│   ├── SplitOpNotFound        no such op is registered
│   ├── SplitOpUnused          the op exists, but not in this graph
│   └── KeyFactorError         a factor of a cache key has no canonical form; names its path
├── ModelError                 a model that cannot be loaded or run (exit code 3)
│   ├── ModelNotFound
│   ├── CheckpointError        corrupt, missing or unexpected tensors
│   └── UnsupportedModel       names the part of the model that is not supported
├── RequestError               a prompt or sampling parameter out of range (exit code 3)
├── OutOfMemory                (exit code 4)
├── CompileError               (exit code 5)
│   ├── GraphBreak             the model does not trace to one graph; names the line
│   ├── SizeSpecialized        a dynamic dim became a constant; names the cause
│   ├── UnknownGuard           Dynamo guarded on something that we cannot check
│   ├── PassFailed             a pass raised or broke the graph, under strict
│   ├── PassExpectation        a pass matched more or less often than `expect` says
│   ├── PieceCompileFailed     Inductor (or its C++ compiler) failed on a piece
│   ├── InputMismatch          a call does not fit what was traced
│   └── NotCompiled            a report was requested before anything was traced
├── CaptureError               (exit code 5)
│   └── GraphNotCaptured
├── WorkerError                a process of another rank ended, raised or did not answer (exit code 1)
├── VerificationError          (exit code 6)
│   └── SelfcheckFailed        a piece or a replay differs from the model
└── CacheError                 the cache cannot do what was requested; compiling goes on uncached (exit code 1)
    ├── UntrustedCache         others could have written a folder or key file; has the command that fixes it
    └── ArchiveRefused         an archive that is damaged, unsigned, or malformed

Bad bytes in a trusted cache are not an error but a miss, and what they held is compiled again. An internal invariant is
an `assert` with a message, never one of these exceptions.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class PiecegraphError(Exception):
    """The base of all our errors. The command line exits with `exit_code`."""

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


class WorkerError(PiecegraphError):
    pass


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
    """Return `" Did you mean 'x'?"` for the nearest known name, else the sorted known names while they are few."""
    names = sorted(known)
    near = difflib.get_close_matches(unknown[:100], names, n=1)  # a name of megabytes would take seconds
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" Known: {', '.join(names)}." if 0 < len(names) <= 40 else ""


def shorten(text: str, limit: int = 80) -> str:
    """Return `text`, or its beginning and its end where it has more than `limit` characters: for messages."""
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-(limit // 4) :]}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that memory ran out, on any device. torch is asked only if it was imported."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # The CPU allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


@contextmanager
def translate_out_of_memory() -> Iterator[None]:
    """Raise `OutOfMemory` for an allocation that fails inside the block, on the CPU or a GPU."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, PiecegraphError) or not is_out_of_memory(error):
            raise
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise OutOfMemory(
            f"out of memory ({first_line}). Lower max_model_len, max_num_batched_tokens or gpu_memory_utilization, or "
            "take a smaller model or dtype."
        ) from error
