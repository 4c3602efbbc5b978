"""Files of compiled kernels as one blob: a zip archive that compresses nothing, for many small files to be one read."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

KERNEL, LIBRARY = "kernel", "library"


@dataclass(frozen=True, slots=True)
class KernelFiles:
    """Files by name, of each kernel by its fingerprint; and the modules that launchers are made of, by path."""

    kernels: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    libraries: Mapping[str, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.kernels or self.libraries)

    def __or__(self, other: KernelFiles) -> KernelFiles:
        return KernelFiles({**self.kernels, **other.kernels}, {**self.libraries, **other.libraries})

    def without(self, other: KernelFiles) -> KernelFiles:
        """What `other` does not have."""
        return KernelFiles(
            {key: files for key, files in self.kernels.items() if key not in other.kernels},
            {path: data for path, data in self.libraries.items() if path not in other.libraries},
        )


def pack(files: KernelFiles) -> bytes:
    """Equal files make equal bytes."""
    members = {f"{LIBRARY}/{path}": data for path, data in files.libraries.items()}
    for key, named in files.kernels.items():
        members |= {f"{KERNEL}/{key}/{name}": data for name, data in named.items()}
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(members.items()):
            archive.writestr(zipfile.ZipInfo(name), data)  # of 1980, whenever it is
    return target.getvalue()


def unpack(data: bytes) -> KernelFiles:
    """What `pack` made bytes of. Raises ValueError for anything else."""
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
    """A member's kind, folder and file name, none of which leads anywhere else. Raises ValueError."""
    parts = name.split("/")
    if len(parts) != 3 or parts[0] not in (KERNEL, LIBRARY) or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"{name!r} is no file of a kernel")
    return parts[0], parts[1], parts[2]
