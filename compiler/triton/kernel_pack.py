"""The files of compiled kernels as one blob: an uncompressed zip archive, so that many small files are one read."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

KERNEL, LIBRARY = "kernel", "library"


@dataclass(frozen=True, slots=True)
class KernelFiles:
    """Kernels by fingerprint, each with its files by name, and the modules of launchers by path."""

    kernels: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    libraries: Mapping[str, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.kernels or self.libraries)

    def __or__(self, other: KernelFiles) -> KernelFiles:
        return KernelFiles({**self.kernels, **other.kernels}, {**self.libraries, **other.libraries})

    def without(self, other: KernelFiles) -> KernelFiles:
        """Return the kernels and modules that `other` does not have."""
        return KernelFiles(
            {key: files for key, files in self.kernels.items() if key not in other.kernels},
            {path: data for path, data in self.libraries.items() if path not in other.libraries},
        )


def pack(files: KernelFiles) -> bytes:
    """Return `files` as bytes; equal files give equal bytes."""
    members = {f"{LIBRARY}/{path}": data for path, data in files.libraries.items()}
    for key, named in files.kernels.items():
        members |= {f"{KERNEL}/{key}/{name}": data for name, data in named.items()}
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(members.items()):
            archive.writestr(zipfile.ZipInfo(name), data)  # with the fixed date 1980, so that the time does not matter
    return target.getvalue()


def unpack(data: bytes) -> KernelFiles:
    """Return the files of bytes that `pack` made. Raises ValueError for other bytes."""
    kernels: dict[str, dict[str, bytes]] = {}
    libraries: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                kind, folder, name = _parts(member.filename)
                content = archive.read(member)
                if kind == KERNEL:
                    kernels.setdefault(folder, {})[name] = content
                else:
                    libraries[f"{folder}/{name}"] = content
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, zlib.error) as error:
        raise ValueError(str(error)) from error
    return KernelFiles(kernels, libraries)


def _parts(name: str) -> tuple[str, str, str]:
    """Return a member's kind, folder and file name. Raises ValueError for a name that leaves the folder."""
    parts = name.split("/")
    if len(parts) != 3 or parts[0] not in (KERNEL, LIBRARY) or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"{name!r} is not a file of a kernel")
    return parts[0], parts[1], parts[2]
