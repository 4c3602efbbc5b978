"""`cache sizes`: the shapes that engines have run, and what other sizes to capture would save."""

from __future__ import annotations

import subprocess
import sys

import pytest

from piecegraph.cache.store.store import Store
from piecegraph.paths import TRAFFIC
from piecegraph.runner.cudagraphs.capture_sizes import default_capture_sizes
from piecegraph.runner.traffic.kept import Kept, add_to_kept
from tests.tools.cache.models import CacheCommand

KEPT = Kept(
    key="a" * 64, model="llama", device="cpu", decode={5: 90, 6: 10}, mixed={37: 25}, max_num_seqs=8, max_num_tokens=64
)


def test_the_histogram_and_what_each_choice_saves(store: Store, cache: CacheCommand) -> None:
    """The linear model counts 64 tokens for every step, and one for each padded token.

    By default batches that are no decode have fewer small sizes than decode.
    """
    add_to_kept(store.layout.root / TRAFFIC, KEPT)
    (record,) = cache.json("sizes", "--sizes", "6,37")
    assert (record["model"], record["device"], record["is_measured"]) == ("llama", "cpu", False)
    assert (record["decode"], record["mixed"]) == ({"5": 90, "6": 10}, {"37": 25})
    default, traffic, given = record["choices"]
    assert (default["name"], default["sizes"], default["saved"]) == ("default", list(default_capture_sizes(64)), 0)
    assert [choice["mixed_sizes"] for choice in record["choices"]] == [[16, 64], traffic["sizes"], given["sizes"]]
    cost = 100 * (64 + 8) + 25 * (64 + 64)
    assert traffic["sizes"] == [5, 6, 38, 64]
    assert traffic["saved"] == pytest.approx(1 - (90 * 69 + 10 * 70 + 25 * 102) / cost)
    assert given["sizes"] == [6, 37] and given["saved"] == pytest.approx(1 - (100 * 70 + 25 * 101) / cost)
    assert cache("sizes").splitlines() == [
        "llama on cpu",
        "  decode  up to      8 requests       100 steps 100.0%",
        "  other   up to     64 tokens          25 steps 100.0%",
        "  default saves   0.0%  1,2,4,8,16,24,32,48,64; other 16,64",
        f"  traffic saves {traffic['saved']:>6.1%}  5,6,38,64",
        "  savings are of padded tokens; --measure-graphs would measure times",
    ]


def test_before_any_engine_was_closed(cache: CacheCommand) -> None:
    assert cache.json("sizes") == []
    assert "no engine has counted its batches yet" in cache.err


def test_sizes_that_are_none_are_refused(store: Store, cache: CacheCommand) -> None:
    add_to_kept(store.layout.root / TRAFFIC, KEPT)
    cache("sizes", "--sizes", "8,4", code=3)
    assert "does not ascend" in cache.err


def test_no_torch_is_imported() -> None:
    code = "import sys, piecegraph.tools.cache.reading.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
