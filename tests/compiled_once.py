"""A C++ compiler that remembers what it made: the same source, options and compiler give a copy of the same file.

Most of what the tests compute on is generated C++, of which much is the same from test to test and from run to run,
while what our own cache holds is void with every line of ours that changes. `install` puts it before the real one on
PATH, under the same name: no setting and no key knows of it. Run as a program it is the compiler:
`compiled_once.py REAL STORE ARGUMENT...`.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NAME = "g++"
REMEMBERED = (".so", ".o", ".i", ".gch")
"""What outputs end in."""

READ_BY_COMPILERS = ("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "GCC_EXEC_PREFIX")


def install(folder: Path) -> None:
    """What this process and those it starts find as `g++` remembers, in `folder`. Nothing where there is no g++."""
    shims, store = folder / "bin", folder / "made"
    path = [entry for entry in os.environ.get("PATH", "").split(os.pathsep) if entry != str(shims)]
    real = shutil.which(NAME, path=os.pathsep.join(path))
    if real is None:
        return
    for created in (shims, store):
        created.mkdir(parents=True, exist_ok=True)
    words = (sys.executable, "-I", "-S", str(Path(__file__).resolve()), real, str(store))
    shim = shims / f"{NAME}.{os.getpid()}"
    shim.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    shim.chmod(0o755)
    shim.replace(shims / NAME)
    os.environ["PATH"] = os.pathsep.join([str(shims), *path])


def made_of(real: str, arguments: Sequence[str]) -> tuple[str, Path] | None:
    """(digest of all that decides the output, output); None for a call that is not remembered."""
    if arguments.count("-o") != 1:
        return None
    place = arguments.index("-o") + 1
    output = Path(arguments[place])
    if output.suffix not in REMEMBERED:
        return None
    text = hashlib.sha256(repr([_stamp(real), *map(os.environ.get, READ_BY_COMPILERS)]).encode())
    for index, argument in enumerate(arguments):
        folder = argument.removeprefix("-I")
        if index == place:
            text.update(output.suffix.encode())
        elif os.path.isfile(argument):
            text.update(Path(argument).suffix.encode() + hashlib.sha256(Path(argument).read_bytes()).digest())
        else:
            text.update(repr((argument, _stamp(folder) if os.path.isdir(folder) else None)).encode())
    return text.hexdigest(), output


def _stamp(path: str) -> tuple[str, int, int]:
    """Another compiler, or another torch to include from, has another."""
    status = os.stat(path)
    return path, status.st_mtime_ns, status.st_size


def compile_once(real: str, store: Path, arguments: Sequence[str]) -> int:
    """The exit status. A failure is not remembered."""
    made = made_of(real, arguments)
    if made is None:
        return subprocess.run([real, *arguments], check=False).returncode
    digest, output = made
    kept = store / digest
    if kept.exists():
        shutil.copy(kept, output)
        return 0
    status = subprocess.run([real, *arguments], check=False).returncode
    if status == 0:
        fresh = store / f"{digest}.{os.getpid()}"
        shutil.copy(output, fresh)
        fresh.replace(kept)
    return status


if __name__ == "__main__":
    sys.exit(compile_once(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
