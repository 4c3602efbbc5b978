"""Key pairs: a private key that signs and a public key that only verifies, Ed25519 by package `cryptography`.

The package is imported only when such a key is read or made.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from piecegraph.cache.disk.canonical import signed_message
from piecegraph.errors import CacheError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SCHEME = "ed25519"
PRIVATE_BEGINS, PUBLIC_BEGINS = b"-----BEGIN PRIVATE KEY-----", b"-----BEGIN PUBLIC KEY-----"
"""The first lines of the two kinds of PEM file."""

_VALUE = re.compile(r"[0-9a-f]{128}")


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key, which verifies and is not secret."""

    key: Ed25519PublicKey
    key_id: str

    scheme: ClassVar[str] = SCHEME

    @classmethod
    def of(cls, key: Ed25519PublicKey) -> PublicKey:
        digest = hashlib.sha256(b"piecegraph public key id\n" + key.public_bytes_raw())
        return cls(key, digest.hexdigest()[:16])

    def __repr__(self) -> str:
        return f"PublicKey({self.key_id})"

    def verifies(self, what: str, data: bytes, value: str) -> bool:
        """Return whether the private key's `sign` gives `value`, in its exact spelling."""
        from cryptography.exceptions import InvalidSignature

        if _VALUE.fullmatch(value) is None:
            return False
        try:
            self.key.verify(bytes.fromhex(value), signed_message(what, data))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """A private key, which signs, and verifies by its public key. It is secret: `repr` shows its name only."""

    key: Ed25519PrivateKey
    public: PublicKey

    scheme: ClassVar[str] = SCHEME

    @classmethod
    def of(cls, key: Ed25519PrivateKey) -> PrivateKey:
        return cls(key, PublicKey.of(key.public_key()))

    @property
    def key_id(self) -> str:
        """The name of the key, the same as the public key's."""
        return self.public.key_id

    def __repr__(self) -> str:
        return f"PrivateKey({self.key_id})"

    def sign(self, what: str, data: bytes) -> dict[str, str]:
        """Return the signature of `data` as a `what`: a signature of an archive is invalid for an entry."""
        value = self.key.sign(signed_message(what, data)).hex()
        return {"scheme": self.scheme, "key_id": self.key_id, "value": value}

    def verifies(self, what: str, data: bytes, value: str) -> bool:
        """Return whether `sign` gives `value`."""
        return self.public.verifies(what, data, value)


def from_pem(text: bytes) -> PrivateKey | PublicKey:
    """Return the key in `text`.

    Raises ValueError, which says what `text` is instead; `CacheError` without the package.
    """
    _need_the_package()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

    if text.count(b"-----BEGIN") != 1:
        raise ValueError("several keys")
    key: object = None
    try:
        if text.startswith(PUBLIC_BEGINS):
            key = load_pem_public_key(text)
        elif text.startswith(PRIVATE_BEGINS):
            key = load_pem_private_key(text, password=None)
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("a damaged key") from None
    if isinstance(key, Ed25519PublicKey):
        return PublicKey.of(key)
    if isinstance(key, Ed25519PrivateKey):
        return PrivateKey.of(key)
    raise ValueError("a key of another kind")


def new_pair_as_pem() -> tuple[bytes, bytes]:
    """Return a new private key and its public key, as PEM. Raises `CacheError` without the package."""
    _need_the_package()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)


def _need_the_package() -> None:
    try:
        import cryptography.hazmat.primitives.asymmetric.ed25519  # noqa: F401
    except ImportError as error:
        raise CacheError(
            "Ed25519 keys (those in PEM files) need package cryptography, which cannot be imported here "
            f"({error}), though piecegraph depends on it. Run: pip install 'cryptography>=42'"
        ) from None
