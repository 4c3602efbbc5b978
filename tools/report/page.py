"""What `piecegraph explain` finds as one page of HTML, which needs nothing else to be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from piecegraph.tools.command_line.quantities import bytes_text, seconds_text
from piecegraph.tools.report.charts import bars, stairs, timeline
from piecegraph.tools.report.template import TEMPLATE

TABLES = (
    ("Decode batches", "requests", "decode"),
    ("Other batches", "tokens", "mixed"),
    ("Batches that verify drafts", "requests", "verification"),
)
"""The dispatch tables: title, what their ranges count, and their name in the record."""


def as_page(record: Mapping[str, Any], *, seconds: Mapping[str, float], weight_bytes: int, version: str) -> str:
    """Return a page of HTML.

    Args:
        record: what `piecegraph explain --json` prints.
        seconds: of each phase of the explanation, in order.
        weight_bytes: the bytes of the weights that one process holds.
        version: of piecegraph.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    eager = [f"unique piece {index} runs eagerly: {reason}" for index, reason in record["eager_pieces"].items()]
    per_token = record["cache_bytes_per_token"]
    memory = {
        "weights": float(weight_bytes),
        f"cache of one text of {record['max_model_len']} tokens": float(per_token * record["max_model_len"]),
        f"cache of {record['max_num_seqs']} texts of 1024 tokens": float(per_token * 1024 * record["max_num_seqs"]),
    }
    return environment.from_string(TEMPLATE).render(
        record=record,
        version=version,
        parameters=_parameters(record["num_parameters"]),
        slower=[*eager, *record["slower_paths"]],
        tables=[(title, unit, stairs(record[name]), record[name]) for title, unit, name in TABLES],
        memory=bars(memory),
        phases=timeline(seconds),
        missed=_missed,
        in_bytes=lambda value: bytes_text(int(value)),
        in_seconds=seconds_text,
    )


def _parameters(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _missed(row: Mapping[str, Any]) -> str:
    """Return what a pass did not rewrite and why, or the error that ended it."""
    misses = Counter(miss["reason"] for miss in row["misses"])
    counted = [f"{reason} ({count} times)" if count > 1 else reason for reason, count in misses.items()]
    return "; ".join(filter(None, [row["error"], row["note"], *counted]))
