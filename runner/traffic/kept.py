"""What engines have measured and counted of a model, kept in the cache directory for later starts and for people."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piecegraph.cache.disk.files import read_regular, write_atomically
from piecegraph.runner.cudagraphs.measured_times import MeasuredTimes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

FORMAT = 1
"""The version of the file. A file of another version counts as none."""

MAX_BYTES = 4 << 20
"""The largest file that is read: about 200,000 different batch shapes."""

_UNSTABLE = ("_name_or_path", "transformers_version")
"""Fields of a config that differ between copies of one model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The facts about one model on one kind of device. Batches are counted before padding."""

    key: str
    model: str = ""  # the last part of the folder or hub id, for people
    device: str = ""
    decode: Mapping[int, int] = field(default_factory=dict)  # requests of a decode batch -> steps
    mixed: Mapping[int, int] = field(default_factory=dict)  # tokens of any other batch -> steps
    max_num_seqs: int = 1  # of the last engine that counted
    max_num_tokens: int = 1  # of a step of that engine
    times: MeasuredTimes = field(default_factory=MeasuredTimes)  # of the last start that measured its graphs


def kept_key(hf_config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Return the key of a model: its config, wherever it lies, its dtype, and the kind of device."""
    fields = {name: value for name, value in hf_config.to_dict().items() if name not in _UNSTABLE}
    facts = [json.dumps(fields, sort_keys=True, default=str), str(dtype), device.type]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def read_kept(folder: Path, key: str) -> Kept:
    """Return what is kept under `key` in `folder`, or an empty `Kept` if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return _parse(key, read_regular(folder / f"{key}.json", MAX_BYTES))
    return Kept(key=key)


def read_all(folder: Path) -> list[Kept]:
    """Return what is kept of every model in `folder`, by the model's name."""
    keys = sorted(file.stem for file in folder.glob("*.json")) if folder.is_dir() else []
    return sorted((read_kept(folder, key) for key in keys), key=lambda kept: (kept.model, kept.device, kept.key))


def add_to_kept(folder: Path, added: Kept) -> bool:
    """Add the counts of `added` to what is kept under its key, and put its times in the place of older ones.

    Processes that do so at once wait for each other. Returns False, and changes nothing, if the folder cannot be
    written. That is no error, because these facts only make steps faster.
    """
    with contextlib.suppress(OSError), _locked(folder):
        before = read_kept(folder, added.key)
        decode, mixed = (
            dict(Counter(old) + Counter(new))
            for old, new in ((before.decode, added.decode), (before.mixed, added.mixed))
        )
        times = added.times if added.times.graphs else before.times
        limits = added if added.decode or added.mixed else before
        merged = replace(
            added,
            decode=decode,
            mixed=mixed,
            max_num_seqs=limits.max_num_seqs,
            max_num_tokens=limits.max_num_tokens,
            times=times,
        )
        write_atomically(folder / f"{added.key}.json", json.dumps(as_record(merged)).encode(), folder)
        return True
    return False


def as_record(kept: Kept) -> dict[str, Any]:
    """Return the contents of the file."""
    return {
        "format": FORMAT,
        "model": kept.model,
        "device": kept.device,
        "decode": {str(size): count for size, count in sorted(kept.decode.items())},
        "mixed": {str(size): count for size, count in sorted(kept.mixed.items())},
        "max_num_seqs": kept.max_num_seqs,
        "max_num_tokens": kept.max_num_tokens,
        "times": kept.times.as_record(),
    }


def _parse(key: str, data: bytes) -> Kept:
    record = json.loads(data)
    if record["format"] != FORMAT:
        raise ValueError(f"format {record['format']!r}")
    return Kept(
        key=key,
        model=str(record["model"]),
        device=str(record["device"]),
        decode=_counts(record["decode"]),
        mixed=_counts(record["mixed"]),
        max_num_seqs=max(1, int(record["max_num_seqs"])),
        max_num_tokens=max(1, int(record["max_num_tokens"])),
        times=MeasuredTimes.from_record(record["times"]),
    )


def _counts(record: Mapping[str, Any]) -> dict[int, int]:
    counts = {int(size): int(count) for size, count in record.items()}
    if any(size < 1 or count < 1 for size, count in counts.items()):
        raise ValueError("sizes and counts are 1 or more")
    return counts


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
