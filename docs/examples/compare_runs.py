"""Two runners on the same prompts: are their tokens equal, and how long does each take?

    python docs/examples/compare_runs.py "SCRIPT MODEL --plain" "SCRIPT MODEL" [--batch 1,8,32]

Each command runs in a process of its own, one after the other, gets the options below, and writes what it measured to
a file. A step is the time of `--tokens` tokens less the time of one, over the steps between them; the best of
`--repeat` runs counts. Tokens are compared first, because two speeds of two different answers compare nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]
SHARED = {"batch": "1,8,32,128", "prompt": 512, "tokens": 129, "repeat": 3}


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", default=SHARED["batch"], help="numbers of requests at a time, joined by commas")
    parser.add_argument("--prompt", type=int, default=SHARED["prompt"], help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=SHARED["tokens"], help="tokens to generate, at least 2")
    parser.add_argument("--repeat", type=int, default=SHARED["repeat"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what each script that is compared takes."""
    parser.add_argument("model", help="a folder with config.json and weights")
    parser.add_argument("--plain", action="store_true", help="the runner without piecegraph")
    parser.add_argument(
        "--exact", action="store_true", help="code that rounds alike on both sides; says nothing of speed"
    )
    parser.add_argument("--memory", type=float, default=0.7, help="the part of the GPU's memory to use")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--out", type=Path, help="the file that receives tokens and times, as JSON")
    add_shared_arguments(parser)


def prompts_of(batch: int, length: int) -> list[list[int]]:
    """Return the prompts of a batch: random ids, the same in each process."""
    draw = random.Random(batch)
    return [[draw.randrange(3, 200) for _ in range(length)] for _ in range(batch)]


def report(arguments: argparse.Namespace, generate: Generate, device: str) -> None:
    """Time `generate(prompts, max_tokens)` at each batch size; print the times, and write times and tokens."""
    runs: dict[str, Any] = {}
    for batch in map(int, arguments.batch.split(",")):
        prompts = prompts_of(batch, arguments.prompt)
        best, tokens = float("inf"), generate(prompts, arguments.tokens)  # the first run warms up
        for _ in range(arguments.repeat):
            start = time.perf_counter()
            generate(prompts, 1)
            first = time.perf_counter()
            generate(prompts, arguments.tokens)
            best = min(best, (time.perf_counter() - first) - (first - start))
        step_ms = best / (arguments.tokens - 1) * 1e3
        runs[str(batch)] = {"step_ms": step_ms, "tokens_per_s": batch / step_ms * 1e3, "tokens": tokens}
        _say(f"{batch} requests: {step_ms:.3f} ms a step, {batch / step_ms * 1e3:.0f} tokens/s on {device}")
    if arguments.out:
        arguments.out.write_text(json.dumps({"device": device, "runs": runs}))


def equal_tokens(one: list[list[int]], other: list[list[int]]) -> tuple[int, int]:
    """Return how many tokens are equal before the first difference of each request, and how many tokens there are."""
    equal = 0
    for left, right in zip(one, other, strict=True):
        pairs = list(zip(left, right, strict=True))
        equal += next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return equal, sum(map(len, one))


def table(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return a line for each batch size: tokens equal, milliseconds a step, tokens a second, ratio (B / A)."""
    lines = ["requests | equal tokens | A, ms a step | B, ms a step | A, tokens/s | B, tokens/s | B / A, ms"]
    for batch, a in one["runs"].items():
        b = other["runs"][batch]
        equal, count = equal_tokens(a["tokens"], b["tokens"])
        values = [
            batch,
            "all" if equal == count else f"{equal} of {count}",
            *(f"{run['step_ms']:.3f}" for run in (a, b)),
            *(f"{run['tokens_per_s']:.0f}" for run in (a, b)),
            f"{b['step_ms'] / a['step_ms']:.3f}",
        ]
        lines.append(" | ".join(values))
    return lines


def _run(command: str, options: list[str], folder: Path, name: str) -> dict[str, Any]:
    out = folder / f"{name}.json"
    subprocess.run([sys.executable, *shlex.split(command), *options, "--out", str(out)], check=True)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  (an example talks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("a", help="a script and its arguments, as one string")
    parser.add_argument("b", help="the script to compare with it")
    add_shared_arguments(parser)
    arguments = parser.parse_args()
    options = [text for name in SHARED for text in (f"--{name}", str(getattr(arguments, name)))]
    with tempfile.TemporaryDirectory() as folder:
        one = _run(arguments.a, options, Path(folder), "a")
        other = _run(arguments.b, options, Path(folder), "b")
    lines = table(one, other)
    _say("\n".join([f"A: {arguments.a}", f"B: {arguments.b}", f"device: {one['device']}, {other['device']}", *lines]))
    all_equal = all(run["tokens"] == other["runs"][batch]["tokens"] for batch, run in one["runs"].items())
    _say("verdict: all tokens are equal" if all_equal else "verdict: tokens differ")


if __name__ == "__main__":
    main()
