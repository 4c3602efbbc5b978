"""Key files: who may read and write them, and how they are created.

Kinds are told apart by content: 64 hexadecimal digits are a shared key (HMAC), PEM is the private or the public half of
a key pair (Ed25519).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from piecegraph.cache.disk.files import (
    NotARegularFile,
    make_folders_above,
    read_with_status,
    sync_folder,
    sync_if_ours,
    unlink_if_exists,
    write_all,
)
from piecegraph.cache.trust.folder_trust import OTHERS_WRITE, move_away_command, quoted
from piecegraph.cache.trust.key_pair import PUBLIC_BEGINS, from_pem, new_pair_as_pem
from piecegraph.cache.trust.keyring import Verifier
from piecegraph.cache.trust.shared_key import KEY_BYTES, SharedKey
from piecegraph.errors import CacheError, UntrustedCache

_MAX_BYTES = 16 << 10
_OTHERS_ANYTHING = stat.S_IRWXG | stat.S_IRWXO
_ALL_BUT_GROUP_READS = OTHERS_WRITE | stat.S_IRWXO
"""The permissions that a shared key may not have, because whoever reads it can sign."""

_FIXED_BY = {OTHERS_WRITE: "go-w", _OTHERS_ANYTHING: "600", _ALL_BUT_GROUP_READS: "g-w,o-rwx"}


def read_own_key(path: Path) -> SharedKey:
    """Read the user's own key from `path`.

    Raises `UntrustedCache` with what to do, FileNotFoundError, OSError.
    """
    text, status = _read(path)
    if status.st_uid != os.geteuid():
        raise UntrustedCache(
            f"key file {path} belongs to user {status.st_uid}; it must be yours. Run: {move_away_command(path)}"
        )
    _refuse_mode(path, status, _OTHERS_ANYTHING)
    key = _shared_key(text)
    if key is None:
        raise UntrustedCache(
            f"key file {path} holds no key ({2 * KEY_BYTES} hexadecimal digits). Without it one is made, and what "
            f"the old one signed is compiled again. Run: {move_away_command(path)}"
        )
    return key


def read_signing_key(path: Path) -> Verifier:
    """Read the configured key in `path`, of any kind.

    It belongs to this user or to root, and nobody else may write it. A public key may be read by all, a shared one by
    its group (those who may run code as each other), a private one by its owner alone.

    Raises `UntrustedCache` with what to do, `CacheError` where it needs a package that is missing, OSError.
    """
    try:
        text, status = _read(path)
    except FileNotFoundError:
        raise UntrustedCache(
            f"signing key file {path} does not exist. Whoever reads what another signs takes that one's public key "
            f"file; whoever signs makes a pair of files, the other one for readers. Run: piecegraph cache keygen "
            f"{quoted(path)}"
        ) from None
    text = text.lstrip()
    is_pem = text.startswith(b"-----BEGIN")
    is_private = is_pem and not text.startswith(PUBLIC_BEGINS)
    if is_private:
        _refuse_mode(path, status, _OTHERS_ANYTHING)
    elif is_pem or _shared_key(text) is None:
        _refuse_mode(path, status, OTHERS_WRITE)
    else:
        _refuse_mode(path, status, _ALL_BUT_GROUP_READS)
    if status.st_uid not in (os.geteuid(), 0):
        raise UntrustedCache(
            f"signing key file {path} belongs to user {status.st_uid}, who can put another key there; it must be "
            f"yours or root's. If you trust it, make a copy of your own. Run: cp {quoted(path)} "
            f"{quoted(path)}.mine && mv -f {quoted(path)}.mine {quoted(path)}"
        )
    why = ""
    if is_pem:
        try:
            return from_pem(text)
        except ValueError as error:
            why = f", but {error}"
    key = _shared_key(text)
    if key is None:
        raise UntrustedCache(
            f"signing key file {path} holds no signing key{why}. Wanted: an Ed25519 key in PEM, without a passphrase, "
            f"or {2 * KEY_BYTES} hexadecimal digits. Make another pair with `piecegraph cache keygen`."
        )
    return key


def load_or_create_own_key(path: Path) -> SharedKey:
    """Return the key in `path`, created if there is none; processes that create it at once all get the same.

    Raises `UntrustedCache`, OSError (a full or read-only disk).
    """
    with contextlib.suppress(FileNotFoundError):
        key = read_own_key(path)
        sync_if_ours(path.parent)  # who made it may have been killed before that
        return key
    make_folders_above(path)
    with contextlib.suppress(FileExistsError):  # somebody else made it meanwhile
        _create(path, secrets.token_hex(KEY_BYTES).encode() + b"\n", 0o600)
    sync_folder(path.parent)
    return read_own_key(path)


def create_key_pair(path: Path) -> Path:
    """Create a private key in `path`, for its owner only, and its public key beside it, for all; return the latter's
    path.

    Raises `CacheError` if one of the two files exists (both stay as they are) or if the package is missing, OSError.
    """
    public_path = path.with_name(path.name + ".pub")
    private, public = new_pair_as_pem()
    try:
        _create(path, private, 0o600)
        try:
            _create(public_path, public, 0o644)
        except BaseException:
            unlink_if_exists(path)
            raise
    except FileExistsError as error:
        raise CacheError(f"{error.filename2} is there already; name a file that is not.") from None
    sync_folder(path.parent)
    return public_path


def _create(path: Path, data: bytes, mode: int) -> None:
    """Create a file that has all of `data` as soon as it has its name. Raises FileExistsError, OSError."""
    temp = path.parent / f".{secrets.token_hex(16)}.tmp"
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.fchmod(fd, mode)  # whatever the umask says
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.link(temp, path)  # unlike rename, leaves what is there
    finally:
        os.unlink(temp)


def _read(path: Path) -> tuple[bytes, os.stat_result]:
    try:
        return read_with_status(path, _MAX_BYTES)
    except NotARegularFile:
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(mode := os.lstat(path).st_mode) or stat.S_ISBLK(mode):
                raise UntrustedCache(f"key file {path} is a device. Name a regular file.") from None
        raise UntrustedCache(f"key file {path} is not a regular file. Run: {move_away_command(path)}") from None


def _refuse_mode(path: Path, status: os.stat_result, forbidden: int) -> None:
    if status.st_mode & forbidden:
        raise UntrustedCache(
            f"key file {path} has mode {stat.filemode(status.st_mode)}: others may have had it. "
            f"Run: chmod {_FIXED_BY[forbidden]} {quoted(path)}"
        )


def _shared_key(text: bytes) -> SharedKey | None:
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return None
    return SharedKey(secret) if len(secret) == KEY_BYTES else None
