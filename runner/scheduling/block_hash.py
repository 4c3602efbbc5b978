"""Digests of the contents of full blocks, by which a cached prefix is found.

A block's keys and values depend on every token before it, so its digest covers its parent's. SHA-256 is used because
two prompts with one digest would read each other's cache: Python's `hash` is short, and that of ints is predictable.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

ROOT_DIGEST = hashlib.sha256(b"piecegraph: start of a prefix").digest()
"""The digest that stands for the parent of every first block."""


def hash_block(parent: bytes, token_ids: Sequence[int], extra_key: bytes = b"") -> bytes:
    """Return the digest, 32 bytes, of a block that follows `parent` (a digest) and holds `token_ids`.

    `extra_key` is everything else that the contents depend on, or that limits which requests may share them. Token ids
    are hashed as int32; one out of that range raises OverflowError.
    """
    (digest,) = hash_blocks(parent, token_ids, len(token_ids), extra_key)
    return digest


def hash_blocks(parent: bytes, token_ids: Sequence[int], block_size: int, extra_key: bytes = b"") -> list[bytes]:
    """Return `hash_block` of each consecutive block of `block_size` tokens, each block the parent of the next."""
    tokens = array("i", token_ids).tobytes()
    num_bytes = len(tokens) * block_size // len(token_ids) if token_ids else 0
    # The length in front keeps (tokens, extra key) apart from any other split of the same bytes.
    length = num_bytes.to_bytes(8, "little")
    digests = []
    for start in range(0, len(tokens), num_bytes) if num_bytes else (0,):
        parent = hashlib.sha256(b"".join((parent, length, tokens[start : start + num_bytes], extra_key))).digest()
        digests.append(parent)
    return digests
