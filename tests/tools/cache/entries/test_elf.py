from __future__ import annotations

import importlib.machinery
from pathlib import Path

import pytest

from piecegraph.tools.cache.entries.elf import loaded_sections

FILES = [
    file
    for folder in Path(importlib.machinery.__file__ or "").parents
    for file in (folder / "lib-dynload").glob("*.so")
]


def library() -> bytes:
    """Return any extension module of Python's."""
    if not FILES:
        pytest.skip("this Python has no extension modules in files")
    return FILES[0].read_bytes()


def test_code_and_constants_are_loaded_and_symbols_are_not() -> None:
    data = library()
    found = loaded_sections(data)
    assert found[".text"] in data
    assert ".dynsym" in found
    assert {".symtab", ".shstrtab", ".comment", ".note.gnu.build-id", ".bss"}.isdisjoint(found)


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" + bytes(100), b"\x7fELF\x01\x01" + bytes(100)])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="ELF file"):
        loaded_sections(data)


def test_a_truncated_file_is_refused() -> None:
    with pytest.raises(ValueError, match="truncated"):
        loaded_sections(library()[:2000])
