"""A model folder converted from a single file and kept in the cache for later starts.

The folder is trusted like the rest of the cache: it is signed, in folders that only this user can write to, and each
file has the digest with which it was written. A folder that fails these checks is never read, and converted again.

Nothing is hashed twice: digests of the source and of the converted files are kept by size, times and inode
(`cache/trust/known_digests.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from piecegraph import environment
from piecegraph.cache.disk.files import sync_folder
from piecegraph.cache.disk.layout import default_key_file
from piecegraph.cache.store.signed_folder import SignedFolderError, check_signed_folder, sign_folder
from piecegraph.cache.trust.folder_trust import Access, check_folder
from piecegraph.cache.trust.key_files import load_or_create_own_key, read_own_key
from piecegraph.cache.trust.key_pair import PrivateKey
from piecegraph.cache.trust.keyring import Keyring, Signer
from piecegraph.cache.trust.known_digests import KnownDigests, default_digests_file
from piecegraph.cache.trust.trusted_keys import read_trusted_keys
from piecegraph.errors import CacheError, UntrustedCache
from piecegraph.paths import cache_root

logger = logging.getLogger(__name__)

Convert = Callable[[Path], None]
"""A function that writes the model's files to an empty folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A model file and the function that converts it."""

    name: str  # the model's name
    source: Path
    format: int  # the version of the output format of `convert`
    convert: Convert


def converted_model(conversion: Conversion) -> Path:
    """Return the converted folder: the one in the cache if it can be trusted, else a new one.

    Concurrent processes convert once: the others wait for the first. An interrupted conversion leaves nothing behind
    that could be mistaken for a model. If the result cannot be cached (the cache belongs to another user, or others
    could have written a folder or a key), the model is converted for this process alone, with a warning that says what
    to do. Raises OSError, and what `convert` raises.
    """
    try:
        return _cached(conversion)
    except _NotCached as error:
        logger.warning("%s is converted for this process alone: %s", conversion.name, error)
    from piecegraph.compiler.common.private_folder import private_folder

    folder = private_folder("model")
    conversion.convert(folder)
    return folder


class _NotCached(Exception):
    """The model can neither be read from the cache nor written to it; the message is the reason."""


def _cached(conversion: Conversion) -> Path:
    """Return the folder in the cache, converted now if necessary. Raises `_NotCached`."""
    models = cache_root() / "models"
    try:
        keyring = _keyring()
        digests = KnownDigests(default_digests_file(), keyring)
        access = _access([cache_root(), models], keyring)
    except (CacheError, OSError) as error:
        raise _NotCached(str(error)) from None
    digest = digests.digest(conversion.source)
    target = models / f"{conversion.name}-{digest[:16]}-v{conversion.format}"
    made_from = f"{digest} v{conversion.format}"
    problem = _problem(target, made_from, keyring, digests)
    if problem is None:
        if digests.is_changed:
            with contextlib.suppress(CacheError, OSError):  # the next start hashes again
                digests.keep(load_or_create_own_key(default_key_file()))
        return target
    if access is Access.READ_ONLY:
        raise _NotCached(
            f"the cache at {cache_root()} belongs to another user and has no good copy of it ({problem}). "
            "Set PIECEGRAPH_CACHE_DIR to a folder of your own to cache it."
        )
    try:
        signers = _signers(keyring)
        cache_root().mkdir(mode=0o700, parents=True, exist_ok=True)  # no group may write to a cache
        models.mkdir(mode=0o700, exist_ok=True)
    except (CacheError, OSError) as error:
        raise _NotCached(str(error)) from None
    from filelock import FileLock

    with contextlib.ExitStack() as locked:
        try:
            locked.enter_context(FileLock(target.with_name(f"{target.name}.lock")))
        except OSError as error:  # the lock cannot be created, or something else has its name
            raise _NotCached(str(error)) from None
        problem = _problem(target, made_from, keyring, digests)
        if problem is not None:
            if problem:
                logger.warning("%s is not used (%s); it is converted again", target, problem)
            _remove(target)
            _convert_into(
                target,
                conversion.convert,
                lambda made: sign_folder(made, made_from, signers, digests),
                is_for_others=len(signers) > 1,
            )
        digests.keep(signers[0])
    return target


def _keyring() -> Keyring:
    """Return the user's own key, if it exists, and the configured keys. Raises `CacheError`, OSError."""
    own = None
    with contextlib.suppress(FileNotFoundError):
        own = read_own_key(default_key_file())
    return Keyring(own, read_trusted_keys(environment.read(environment.SIGNING_KEY_FILE)))


def _signers(keyring: Keyring) -> list[Signer]:
    """Return the user's own key, created if necessary, and the configured key if it is a private one.

    Folders signed with a configured private key are meant for other users, too. Raises `CacheError`, OSError.
    """
    own: Signer = load_or_create_own_key(default_key_file())
    return [own, keyring.signer] if isinstance(keyring.signer, PrivateKey) else [own]


def _access(folders: Sequence[Path], keyring: Keyring) -> Access:
    """Return the access allowed to the existing ones of `folders`. Raises `UntrustedCache`, OSError."""
    access = Access.READ_WRITE
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            is_root = folder == cache_root()
            if check_folder(folder, has_signing_key=bool(keyring.trusted), is_root=is_root) is Access.READ_ONLY:
                access = Access.READ_ONLY
    return access


def _problem(target: Path, made_from: str, keyring: Keyring, digests: KnownDigests) -> str | None:
    """Return why `target` cannot be used: "" if it does not exist; None if it matches its signature."""
    try:
        check_signed_folder(target, made_from, keyring, digests)
    except FileNotFoundError:
        return ""
    except (SignedFolderError, OSError) as error:
        return str(error)
    return None


def _remove(target: Path) -> None:
    """Remove whatever has the name `target`. Raises `UntrustedCache`, with what to do, if that fails."""
    try:
        status = os.lstat(target)
        if stat.S_ISDIR(status.st_mode):
            aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            target.rename(aside / "not-used")
            shutil.rmtree(aside, ignore_errors=True)
        else:
            target.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UntrustedCache(
            f"{target} differs from what was signed, and cannot be removed: {error}. Remove it."
        ) from None


def _convert_into(target: Path, convert: Convert, sign: Callable[[Path], None], *, is_for_others: bool) -> None:
    """Write the model folder beside `target`, sign it, flush it to the disk, then rename it to `target`."""
    for orphan in target.parent.glob(f".{target.name}-*"):  # left by a killed conversion; this process has the lock
        shutil.rmtree(orphan, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        convert(scratch)
        for file in scratch.iterdir():
            file.chmod(0o644 if is_for_others else 0o600)  # whatever the umask says
            _flush(file)
        sign(scratch)
        if is_for_others:
            for folder in (scratch, target.parent, target.parent.parent):
                folder.chmod(0o755)
        scratch.rename(target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
