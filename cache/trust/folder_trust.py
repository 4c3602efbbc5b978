"""Trust in folders: those that only we can write, or another user's whose entries a configured key has signed."""

from __future__ import annotations

import enum
import os
import shlex
import stat
from pathlib import Path

from piecegraph.errors import UntrustedCache

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Access(enum.Enum):
    READ_WRITE = "read and write"
    READ_ONLY = "read only"  # another user's, whose entries a configured key must have signed


def quoted(path: Path) -> str:
    """Return the path quoted for a shell."""
    return shlex.quote(str(path))


def move_away_command(path: Path) -> str:
    """Return the command that moves `path` away."""
    return f"mv {quoted(path)} {quoted(path.with_name(path.name + '.old'))}"


def check_folder(path: Path, *, has_signing_key: bool, is_root: bool = True) -> Access:
    """Return the access to `path`.

    A folder that is ours and writable by nobody else is read and written. Another user's, writable by its owner only,
    is read if a signing key is configured. `is_root` says that the user has chosen the location. Raises
    `UntrustedCache` with the command that fixes it, FileNotFoundError, OSError.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        leads = f"to {os.readlink(path)}" + ("" if os.path.exists(path) else ", where nothing is")
        what = f"cache folder {path} is a symbolic link ({leads}), which whoever owns it may turn elsewhere."
        if not is_root:
            raise UntrustedCache(f"{what} The next save makes a folder in its place. Run: {move_away_command(path)}")
        raise UntrustedCache(f"{what} Set PIECEGRAPH_CACHE_DIR to where it leads: {os.path.realpath(path)}")
    if not stat.S_ISDIR(status.st_mode):
        instead = "Set PIECEGRAPH_CACHE_DIR to one, or move it away. " if is_root else ""
        raise UntrustedCache(f"{path} is not a directory. {instead}Run: {move_away_command(path)}")
    if status.st_mode & OTHERS_WRITE:
        raise UntrustedCache(
            f"cache folder {path} has mode {stat.filemode(status.st_mode)}: others can put code there that would run "
            f"as you. Run: chmod go-w {quoted(path)}"
        )
    if status.st_uid == os.geteuid():
        return Access.READ_WRITE
    if has_signing_key:
        return Access.READ_ONLY
    raise UntrustedCache(
        f"cache folder {path} belongs to user {status.st_uid}, and you are {os.geteuid()}. Set PIECEGRAPH_CACHE_DIR to "
        "a folder of yours, configure the public key of whoever signed it to read it, or take it over. "
        f"Run: chown -R {os.geteuid()} {quoted(path)}"
    )
