"""Whose bytes we take: folders only we can write, and documents signed with a key we hold.

Signatures are HMAC-SHA256. That is one key to sign and to verify with: an image that is read by others needs a
signing key file that they can read, and whoever can read it could sign too. Keep it where only those who run the
image can get at it. (A public key would need a library that piecegraph does not depend on: docs/decisions/004.)
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import os
import secrets
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piecegraph.cache.files import (
    NotARegularFile,
    make_folders_above,
    read_with_status,
    sync_folder,
    sync_if_ours,
    write_all,
)
from piecegraph.errors import UntrustedCache

SCHEME = "hmac-sha256"
_KEY_BYTES = 32
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A secret. `repr` shows its name only."""

    secret: bytes

    @property
    def key_id(self) -> str:
        """Names the key and gives nothing of it away."""
        return hashlib.sha256(b"piecegraph key id\n" + self.secret).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"SigningKey({self.key_id})"

    def sign(self, what: str, data: bytes) -> dict[str, str]:
        """The signature of `data` as a `what`: an archive's does not pass for an entry's."""
        return {"scheme": SCHEME, "key_id": self.key_id, "value": self._mac(what, data)}

    def _mac(self, what: str, data: bytes) -> str:
        return hmac.new(self.secret, f"piecegraph {what} 1\n".encode() + data, hashlib.sha256).hexdigest()


class Verdict(enum.Enum):
    GOOD = "good"
    FORGED = "forged"  # says it is signed by a key we hold, and is not
    UNKNOWN_KEY = "unknown key"  # unsigned, or signed by a key we do not hold


@dataclass(frozen=True, slots=True)
class Keyring:
    """The keys whose signatures count. `own` signs; it is None until the first save, or where none may be made."""

    own: SigningKey | None = None
    signing: tuple[SigningKey, ...] = ()

    def verify(self, what: str, data: bytes, signature: Any) -> Verdict:
        """Whether `signature` is one of ours for `data`; never raises, whatever `signature` is."""
        if not isinstance(signature, dict) or signature.get("scheme") != SCHEME:
            return Verdict.UNKNOWN_KEY
        value, key_id = signature.get("value"), signature.get("key_id")
        for key in (*self.signing, *([self.own] if self.own is not None else ())):
            if key.key_id == key_id:
                right = isinstance(value, str) and hmac.compare_digest(key._mac(what, data).encode(), _bytes(value))
                return Verdict.GOOD if right else Verdict.FORGED
        return Verdict.UNKNOWN_KEY


def _bytes(value: str) -> bytes:
    return value.encode("utf-8", errors="replace")


def read_key(path: Path, *, shared: bool = False) -> SigningKey:
    """The key in `path`: 64 hexadecimal digits. `shared`: others may read it, none may write it.

    Raises `UntrustedCache` with what to do, FileNotFoundError, OSError.
    """
    try:
        text, status = read_with_status(path, 1024)
    except NotARegularFile:
        raise UntrustedCache(f"key file {path} is not a regular file. Run: {_move_away(path)}") from None
    if not shared and status.st_uid != os.geteuid():
        raise UntrustedCache(
            f"key file {path} belongs to user {status.st_uid}; it must be yours. Run: {_move_away(path)}"
        )
    forbidden = _OTHERS_WRITE if shared else 0o077
    if status.st_mode & forbidden:
        mode, wanted = stat.filemode(status.st_mode), "go-w" if shared else "600"
        raise UntrustedCache(
            f"key file {path} has mode {mode}: others may have had it. Run: chmod {wanted} {_quoted(path)}"
        )
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) != _KEY_BYTES:
        raise UntrustedCache(
            f"key file {path} holds no key ({2 * _KEY_BYTES} hexadecimal digits). Without it one is made, and what "
            f"the old one signed is compiled again. Run: {_move_away(path)}"
        )
    return SigningKey(secret)


def load_or_create_key(path: Path) -> SigningKey:
    """The key in `path`, made if there is none; of processes that make it at once, all get the same.

    Raises `UntrustedCache`, OSError (a full or read-only disk).
    """
    with contextlib.suppress(FileNotFoundError):
        key = read_key(path)
        sync_if_ours(path.parent)  # who made it may have been killed before that
        return key
    make_folders_above(path)
    temp = path.parent / f".{secrets.token_hex(16)}.tmp"
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            write_all(fd, secrets.token_hex(_KEY_BYTES).encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        with contextlib.suppress(FileExistsError):
            os.link(temp, path)  # unlike rename, leaves a key that somebody else made meanwhile
    finally:
        os.unlink(temp)
    sync_folder(path.parent)
    return read_key(path)


class Access(enum.Enum):
    READ_WRITE = "read and write"
    READ_ONLY = "read only"  # another user's, whose entries a configured key must have signed


def _quoted(path: Path) -> str:
    """For a shell."""
    return shlex.quote(str(path))


def _move_away(path: Path) -> str:
    return f"mv {_quoted(path)} {_quoted(path.with_name(path.name + '.old'))}"


def check_folder(path: Path, *, has_signing_key: bool, is_root: bool = True) -> Access:
    """What may be done in `path`. Raises `UntrustedCache` with the command that mends it, FileNotFoundError, OSError.

    Ours and writable by nobody else: everything. Another user's, and writable by its owner only: it may be read if
    a signing key is configured. Nothing else. `is_root`: the user has chosen where it lies.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        what = f"cache folder {path} is a symbolic link, which whoever owns it may turn elsewhere."
        if not is_root:
            raise UntrustedCache(f"{what} Run: {_move_away(path)}")
        raise UntrustedCache(f"{what} Set PIECEGRAPH_CACHE_DIR to where it leads: {os.path.realpath(path)}")
    if not stat.S_ISDIR(status.st_mode):
        raise UntrustedCache(f"{path} is no folder. Run: {_move_away(path)}")
    if status.st_mode & _OTHERS_WRITE:
        raise UntrustedCache(
            f"cache folder {path} has mode {stat.filemode(status.st_mode)}: others can put code there that would run "
            f"as you. Run: chmod go-w {_quoted(path)}"
        )
    if status.st_uid == os.geteuid():
        return Access.READ_WRITE
    if has_signing_key:
        return Access.READ_ONLY
    raise UntrustedCache(
        f"cache folder {path} belongs to user {status.st_uid}, and you are {os.geteuid()}. Set PIECEGRAPH_CACHE_DIR to "
        "a folder of yours, configure the key its entries are signed with to read it, or take it over. "
        f"Run: chown -R {os.geteuid()} {_quoted(path)}"
    )
