"""The keyring: the trusted keys, and their verdict on a signature."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeAlias

from piecegraph.cache.trust.key_pair import PrivateKey, PublicKey
from piecegraph.cache.trust.shared_key import SharedKey

Signer: TypeAlias = SharedKey | PrivateKey
Verifier: TypeAlias = SharedKey | PrivateKey | PublicKey


class Verdict(enum.Enum):
    GOOD = "good"
    FORGED = "forged"  # says it is signed by a key we hold, and is not
    UNKNOWN_KEY = "unknown key"  # unsigned, or signed by a key we do not hold


@dataclass(frozen=True, slots=True)
class Keyring:
    """The trusted keys. `own` signs what the user keeps; it is None until the first save, or if none may be created."""

    own: SharedKey | None = None
    trusted: tuple[Verifier, ...] = ()  # those that are configured

    @property
    def signer(self) -> Signer | None:
        """The first configured key that can sign, or None."""
        return next((key for key in self.trusted if not isinstance(key, PublicKey)), None)

    def verify(self, what: str, data: bytes, signature: Any) -> Verdict:
        """Return the verdict on `signature` of `data` as a `what`. Never raises, whatever `signature` is."""
        if not isinstance(signature, dict):
            return Verdict.UNKNOWN_KEY
        value, named = signature.get("value"), (signature.get("scheme"), signature.get("key_id"))
        for key in self._all():
            if (key.scheme, key.key_id) == named:
                right = isinstance(value, str) and key.verifies(what, data, value)
                return Verdict.GOOD if right else Verdict.FORGED
        return Verdict.UNKNOWN_KEY

    def whose(self, signature: Any) -> str:
        """Return `"own"`, `"configured"` or `"not held"` for the key that `signature` names. The signature may be
        wrong."""
        named = (signature.get("scheme"), signature.get("key_id")) if isinstance(signature, dict) else None
        if self.own is not None and (self.own.scheme, self.own.key_id) == named:
            return "own"
        return "configured" if any((key.scheme, key.key_id) == named for key in self.trusted) else "not held"

    def _all(self) -> tuple[Verifier, ...]:
        return self.trusted if self.own is None else (*self.trusted, self.own)
