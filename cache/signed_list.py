"""One signature over the files of all entries that a private key has signed, for listings.

To verify a signature of a private key takes 0.1 to 0.2 ms, for a thousand entries longer than all else of a listing.
Nothing depends on this file: where it is missing, damaged or older than an entry (of two processes that save at once
one may have missed the other), that entry's own signature is verified. Loads verify that one always.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType

from piecegraph.cache.canonical import canonical_json, parse_canonical
from piecegraph.cache.files import entries_of, read_regular, write_atomically
from piecegraph.cache.key_pair import PrivateKey
from piecegraph.cache.keyring import Keyring, Verdict
from piecegraph.cache.layout import Layout
from piecegraph.cache.shared_key import SharedKey

MAX_BYTES = 64 << 20

NOTHING: Mapping[str, str] = MappingProxyType({})


def read_signed_list(layout: Layout, keyring: Keyring) -> Mapping[str, str]:
    """Keys of entries -> sha256 of their files as they were signed; nothing unless by the configured key of a pair."""
    if keyring.signing is None or isinstance(keyring.signing, SharedKey):
        return NOTHING
    try:
        file = parse_canonical(read_regular(layout.signed_list, MAX_BYTES))
    except (OSError, ValueError):
        return NOTHING
    if not isinstance(file, dict) or not isinstance(digests := file.get("digests"), dict):
        return NOTHING
    good = keyring.verify("list", canonical_json(digests), file.get("signature")) is Verdict.GOOD
    return digests if good else NOTHING


def add_to_signed_list(layout: Layout, signer: PrivateKey, key: str, data: bytes, mode: int) -> None:
    """Have it name the entry of `key`, whose file holds `data`, and drop entries that are gone. Raises OSError."""
    there = {item.name for item in entries_of(layout.entries)}
    known = read_signed_list(layout, Keyring(signing=signer))
    digests = {key: digest for key, digest in known.items() if f"{key}.json" in there}
    digests[key] = file_digest(data)
    signature = signer.sign("list", canonical_json(digests))
    write_atomically(
        layout.signed_list, canonical_json({"digests": digests, "signature": signature}), layout.temp, mode
    )


def file_digest(data: bytes) -> str:
    """As it stands in the list."""
    return hashlib.sha256(data).hexdigest()
