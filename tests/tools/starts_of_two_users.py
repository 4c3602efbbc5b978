"""A model is started by us, and then by another user; prints what came of both as JSON.

Arguments: a JSON object with `model` (a folder), `options` of `LLM`, `root` of the cache, and `user`, who need have no
account. That user may not be allowed to read the interpreter's own folders: the second start is in a process forked
from that of the first, which has imported everything, and remembers the digests of sources that the first has read.

A GPU cannot be used on both sides of a fork: there the second start is in a process of its own, for which that user
must be allowed to read the interpreter's folders, torch's and ours; `theirs` says so where they are not.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from piecegraph.compiler.tracing import traced_sources
from tests.compiler.one_start import forbid_compiling, llm


def main() -> None:
    asked = json.loads(sys.argv[1])
    if asked.get("alone"):
        forbid_compiling()
        sys.stdout.write(json.dumps(start(asked)))
        return
    setattr(traced_sources, "_digest", functools.cache(traced_sources._digest))  # noqa: B010
    ours = start(asked)
    before = files(Path(asked["root"]))
    theirs = (started_anew if asked["options"]["device"] == "cuda" else started_forked)(asked)
    sys.stdout.write(json.dumps({"ours": ours, "theirs": theirs, "is_unchanged": files(Path(asked["root"])) == before}))


def started_anew(asked: dict[str, Any]) -> Any:
    who: dict[str, Any] = {"user": asked["user"], "group": asked["user"], "extra_groups": [], "capture_output": True}
    tried = subprocess.run([sys.executable, "-c", "import torch, transformers, piecegraph, tests"], **who, check=False)
    if tried.returncode != 0:
        return {"cannot_read": tried.stderr.decode().strip().splitlines()[-1:]}
    command = [sys.executable, "-m", "tests.tools.starts_of_two_users", json.dumps({**asked, "alone": True})]
    done = subprocess.run(command, **who, check=False)
    sys.stderr.write(done.stderr.decode())
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def started_forked(asked: dict[str, Any]) -> Any:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(asked["user"])
        os.setuid(asked["user"])
        forbid_compiling()
        with os.fdopen(writing, "w") as out:
            json.dump(start(asked), out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as found:
        text = found.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if status == 0 else None


def start(asked: dict[str, Any]) -> dict[str, Any]:
    compiled, result = llm(asked)
    return {"user": os.geteuid(), "result": result, "cache": compiled.report().as_dict()["cache"]}


def files(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return the mode, the bytes and the last change of everything in a cache."""
    found = {str(path): path.stat() for path in sorted(root.rglob("*"))}
    return {path: (status.st_mode, status.st_size, status.st_mtime_ns) for path, status in found.items()}


if __name__ == "__main__":
    main()
