"""A key that signs and verifies: HMAC-SHA256. Whoever can verify with it could sign with it too."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import ClassVar

from piecegraph.cache.canonical import signed_message

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class SharedKey:
    """A secret. `repr` shows its name only."""

    secret: bytes

    scheme: ClassVar[str] = "hmac-sha256"

    @property
    def key_id(self) -> str:
        """Names the key and gives nothing of it away."""
        return hashlib.sha256(b"piecegraph key id\n" + self.secret).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"SharedKey({self.key_id})"

    def sign(self, what: str, data: bytes) -> dict[str, str]:
        """The signature of `data` as a `what`: an archive's does not pass for an entry's."""
        return {"scheme": self.scheme, "key_id": self.key_id, "value": self._mac(what, data)}

    def fits(self, what: str, data: bytes, value: str) -> bool:
        """Whether `value` is what `sign` gives."""
        return hmac.compare_digest(self._mac(what, data).encode(), value.encode("utf-8", errors="replace"))

    def _mac(self, what: str, data: bytes) -> str:
        return hmac.digest(self.secret, signed_message(what, data), "sha256").hex()
