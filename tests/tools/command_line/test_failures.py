from __future__ import annotations

import errno
from pathlib import Path

from piecegraph.errors import CompileError, GraphNotCaptured, OutOfMemory, is_out_of_memory
from piecegraph.tools.command_line.failures import exit_code_of, message_of


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_an_error_of_ours_is_found_inside_one_of_torchs() -> None:
    """torch wraps what a backend raises; the exit code and the words are ours."""
    error = raised_from(RuntimeError("backend failed"), CompileError("piece 3 did not compile"))
    assert exit_code_of(error) == 5
    assert message_of(error) == "piece 3 did not compile"


def test_a_key_error_of_ours_is_not_quoted() -> None:
    assert message_of(GraphNotCaptured("no graph for 7")) == "no graph for 7"


def test_running_out_of_memory_has_its_own_code() -> None:
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    assert is_out_of_memory(error)
    assert exit_code_of(error) == exit_code_of(OutOfMemory()) == exit_code_of(MemoryError()) == 4
    assert "Lower --max-model-len" in message_of(error)


def test_torchs_own_out_of_memory_error_is_known() -> None:
    import torch

    assert exit_code_of(torch.OutOfMemoryError("CUDA out of memory")) == 4


def test_an_unexpected_error_is_named_in_one_line() -> None:
    error = ValueError("\nfirst\nsecond")
    assert exit_code_of(error) == 1
    assert message_of(error) == "ValueError: first (unexpected; run again with --debug for more)"
    assert "no message" in message_of(FileNotFoundError())
    assert Path("x").name in message_of(OSError(2, "x"))


def test_a_full_disk_behind_stdout_is_named() -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    assert (exit_code_of(error), message_of(error)) == (
        1,
        "writing failed: No space left on device. Free some room, or write elsewhere.",
    )
