"""Shared keys, which sign and verify: HMAC-SHA256. Whoever can verify with one can sign with it too."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import ClassVar

from piecegraph.cache.disk.canonical import signed_message

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class SharedKey:
    """A shared key, which is secret: `repr` shows its name only."""

    secret: bytes

    scheme: ClassVar[str] = "hmac-sha256"

    @property
    def key_id(self) -> str:
        """The name of the key, which reveals nothing of the secret."""
        return hashlib.sha256(b"piecegraph key id\n" + self.secret).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"SharedKey({self.key_id})"

    def sign(self, what: str, data: bytes) -> dict[str, str]:
        """Return the signature of `data` as a `what`: a signature of an archive is invalid for an entry."""
        return {"scheme": self.scheme, "key_id": self.key_id, "value": self._mac(what, data)}

    def verifies(self, what: str, data: bytes, value: str) -> bool:
        """Return whether `sign` gives `value`."""
        return hmac.compare_digest(self._mac(what, data).encode(), value.encode("utf-8", errors="replace"))

    def _mac(self, what: str, data: bytes) -> str:
        return hmac.digest(self.secret, signed_message(what, data), "sha256").hex()
