"""The keys whose signatures count, and what they make of a signature."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeAlias

from piecegraph.cache.key_pair import PrivateKey, PublicKey
from piecegraph.cache.shared_key import SharedKey

Signer: TypeAlias = SharedKey | PrivateKey
Verifier: TypeAlias = SharedKey | PrivateKey | PublicKey


class Verdict(enum.Enum):
    GOOD = "good"
    FORGED = "forged"  # says it is signed by a key we hold, and is not
    UNKNOWN_KEY = "unknown key"  # unsigned, or signed by a key we do not hold


@dataclass(frozen=True, slots=True)
class Keyring:
    """`own` signs what the user keeps; it is None until the first save, or where none may be made."""

    own: SharedKey | None = None
    signing: Verifier | None = None  # the configured one

    def verify(self, what: str, data: bytes, signature: Any) -> Verdict:
        """Whether `signature` is one of ours for `data`; never raises, whatever `signature` is."""
        if not isinstance(signature, dict):
            return Verdict.UNKNOWN_KEY
        value, named = signature.get("value"), (signature.get("scheme"), signature.get("key_id"))
        for key in (self.signing, self.own):
            if key is not None and (key.scheme, key.key_id) == named:
                right = isinstance(value, str) and key.fits(what, data, value)
                return Verdict.GOOD if right else Verdict.FORGED
        return Verdict.UNKNOWN_KEY
