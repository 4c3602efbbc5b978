"""Names for the contents of full blocks, by which a prefix is found again.

A block's keys and values depend on every token before it, so its digest covers its parent's. SHA-256, because
two prompts of one digest would read each other's cache: Python's `hash` is short, and of ints it is no secret.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

ROOT_DIGEST = hashlib.sha256(b"piecegraph: start of a prefix").digest()
"""The parent of every first block."""


def hash_block(parent: bytes, token_ids: Sequence[int], extra_key: bytes = b"") -> bytes:
    """Digest of 32 bytes of a block that follows `parent` (a digest) and holds `token_ids`.

    `extra_key` is whatever else the contents depend on, or whom they may be shared with. Token ids are hashed
    as int32; one out of its range raises OverflowError.
    """
    tokens = array("i", token_ids).tobytes()
    # The length in front keeps (tokens, extra key) apart from any other split of the same bytes.
    return hashlib.sha256(b"".join((parent, len(tokens).to_bytes(8, "little"), tokens, extra_key))).digest()
