"""The loaded parts of a shared library. Two builds of one source differ elsewhere, in the names of their folders."""

from __future__ import annotations

import struct

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_ALLOCATED = 2
_NO_BITS = 8
_BUILD_ID = ".note.gnu.build-id"
"""The section with a digest of the whole file, folder names included."""


def loaded_sections(data: bytes) -> dict[str, bytes]:
    """Return the contents, by name, of the sections of a 64-bit little-endian ELF file that are mapped into memory.

    The build id is left out. Raises ValueError for anything else.
    """
    try:
        fields = _HEADER.unpack_from(data)
        if not fields[0].startswith(b"\x7fELF\x02\x01"):
            raise ValueError("no 64-bit ELF file")
        offset, size, count, names_at = fields[6], fields[11], fields[12], fields[13]
        sections = [_SECTION.unpack_from(data, offset + index * size) for index in range(count)]
        names = _content(data, sections[names_at])
    except (struct.error, IndexError) as error:
        raise ValueError(f"a truncated ELF file ({error})") from None
    found = {}
    for section in sections:
        name = names[section[0] :].split(b"\0", 1)[0].decode("ascii", errors="replace")
        if section[2] & _ALLOCATED and section[1] != _NO_BITS and name != _BUILD_ID:
            found[name] = _content(data, section)
    return found


def _content(data: bytes, section: tuple[int, ...]) -> bytes:
    return data[section[4] : section[4] + section[5]]
