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
    (digest,) = hash_blocks(parent, token_ids, len(token_ids), extra_key)
    return digest


def hash_blocks(parent: bytes, token_ids: Sequence[int], block_size: int, extra_key: bytes = b"") -> list[bytes]:
    """`hash_block` of consecutive blocks of `block_size` tokens, which `token_ids` are made of, each the parent of
    the next."""
    tokens = array("i", token_ids).tobytes()
    num_bytes = len(tokens) * block_size // len(token_ids) if token_ids else 0
    # The length in front keeps (tokens, extra key) apart from any other split of the same bytes.
    length = num_bytes.to_bytes(8, "little")
    digests = []
    for start in range(0, len(tokens), num_bytes) if num_bytes else (0,):
        parent = hashlib.sha256(b"".join((parent, length, tokens[start : start + num_bytes], extra_key))).digest()
        digests.append(parent)
    return digests
