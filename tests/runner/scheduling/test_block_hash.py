"""A block's digest names its tokens, all before them, and whom they are for."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest

from piecegraph.runner.scheduling.block_hash import ROOT_DIGEST, hash_block, hash_blocks


def test_equal_blocks_have_equal_digests_of_32_bytes() -> None:
    digest = hash_block(ROOT_DIGEST, [1, 2, 3], b"salt")
    assert digest == hash_block(ROOT_DIGEST, (1, 2, 3), b"salt")
    assert len(digest) == hashlib.sha256().digest_size


@pytest.mark.parametrize(
    "other",
    [
        hash_block(ROOT_DIGEST, [1, 2, 4]),
        hash_block(ROOT_DIGEST, [2, 1, 3]),
        hash_block(ROOT_DIGEST, [1, 2]),
        hash_block(ROOT_DIGEST, [1, 2, 3], b"salt"),
        hash_block(hash_block(ROOT_DIGEST, [0]), [1, 2, 3]),
        hash_block(ROOT_DIGEST, [1, 2], (3).to_bytes(4, sys.byteorder)),
    ],
    ids=["token", "order", "length", "extra key", "parent", "token as extra key"],
)
def test_different_blocks_have_different_digests(other: bytes) -> None:
    assert other != hash_block(ROOT_DIGEST, [1, 2, 3])


def test_python_hashes_collide_where_digests_do_not() -> None:
    """The reason for a digest: hash(-1) == hash(-2)."""
    assert hash((-1,)) == hash((-2,))
    assert hash_block(ROOT_DIGEST, [-1]) != hash_block(ROOT_DIGEST, [-2])


def test_digests_are_the_same_in_every_process() -> None:
    code = "from piecegraph.runner.scheduling.block_hash import *; print(hash_block(ROOT_DIGEST, [1, 2], b'x').hex())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hash_block(ROOT_DIGEST, [1, 2], b"x").hex()


def test_a_token_outside_int32_is_refused() -> None:
    with pytest.raises(OverflowError):
        hash_block(ROOT_DIGEST, [2**31])


def test_consecutive_blocks_are_hashed_as_one_by_one() -> None:
    tokens = list(range(12))
    first = hash_block(ROOT_DIGEST, tokens[:4], b"salt")
    second = hash_block(first, tokens[4:8], b"salt")
    assert hash_blocks(ROOT_DIGEST, tokens, 4, b"salt") == [first, second, hash_block(second, tokens[8:], b"salt")]
