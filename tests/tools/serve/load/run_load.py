"""Load on a real server: `python -m tests.tools.serve.load.run_load --users 200 --seconds 600`, or `--embedded`.

locust's users stream completions of prompts whose offline answers are known, and compare every token. The last line
is the verdict: no stream failed, and the server's memory was flat after warm-up.
"""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from piecegraph import LLM, SamplingParams
from tests.runner.byte_tokenizer import byte_tokenizer
from tests.runner.tiny_models import llama_config, random_model, save
from tests.tools.serve.serving import running_server

MARGIN = 0.01
"""The least distance of the two best log probabilities at each token of a case: matrix products differ by the size of
the batch in their last bits, and an answer must not depend on them."""

WARM_UP = 1 / 4
"""The part of the run after which memory should not grow."""

MIB = 2**20

CACHE_BYTES = 512 * MIB
"""The size of the KV cache: 11,000 tokens of the embedded model in float32, more than all users need at once."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a run has shown."""

    num_streams: int
    num_left: int  # by clients who went away
    num_failures: int
    tokens_per_second: float
    first_token_ms: tuple[float, float]  # median and 99 %
    stream_ms: tuple[float, float]
    rss: Sequence[tuple[float, int]]  # seconds, bytes of the server's resident memory

    @property
    def growth_bytes(self) -> int:
        """The most memory in the last quarter less the most between the warm-up and the middle."""
        end = self.rss[-1][0]
        early = [size for at, size in self.rss if WARM_UP * end <= at <= end / 2]
        late = [size for at, size in self.rss if at >= 3 / 4 * end]
        return max(late) - max(early)

    def __str__(self) -> str:
        first, whole = self.first_token_ms, self.stream_ms
        sizes = ", ".join(f"{size / MIB:.0f} at {at:.0f} s" for at, size in self.rss[:: max(len(self.rss) // 8, 1)])
        return (
            f"{self.num_streams} streams equal to their offline answers, {self.num_left} left early by their clients, "
            f"{self.num_failures} failures\n{self.tokens_per_second:.0f} tokens/s; first token {first[0]:.0f} ms "
            f"(99 %: {first[1]:.0f}), stream {whole[0]:.0f} ms (99 %: {whole[1]:.0f})\nresident MiB: {sizes}; "
            f"{self.growth_bytes / MIB:+.1f} MiB from the second quarter to the last"
        )


def tiny_model(folder: Path) -> Path:
    """Write a tiny Llama over the byte tokenizer's vocabulary, and return its folder."""
    config = llama_config(vocab_size=261, eos_token_id=1, max_position_embeddings=512)
    saved = save(random_model(config), folder)
    byte_tokenizer().save_pretrained(str(saved))
    return saved


def offline_cases(model: Path | None, *, num_cases: int, max_tokens: int) -> list[dict[str, list[int]]]:
    """Return prompts of token ids and their greedy answers, without those whose answers hang on the last bits."""
    draw = random.Random(0)
    with LLM(model, dtype="float32", compiler="eager", max_model_len=512, max_num_seqs=16) as llm:
        size = llm.engine.vocab_size
        prompts = [[draw.randrange(3, size) for _ in range(draw.randint(3, 40))] for _ in range(3 * num_cases)]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    cases = []
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        distances = [
            best.logprob - second.logprob
            for best, second in (
                sorted(one.values(), key=lambda each: -each.logprob)[:2] for one in completion.logprobs
            )
        ]
        if min(distances) > MARGIN:
            cases.append({"prompt": prompt, "expected": list(completion.token_ids)})
    assert len(cases) >= num_cases // 2, f"{len(cases)} of {len(prompts)} prompts have answers with a margin"
    return cases[:num_cases]


def run_load(model: Path | None, cases: Sequence[object], folder: Path, *, users: int, seconds: float) -> LoadResult:
    """Serve the model, None for the embedded one, have `users` stream for so long, and return what they saw."""
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    num_seqs = min(users, 64)
    flags = ["--max-model-len", "512", "--max-num-seqs", str(num_seqs), "--max-num-queued-reqs", str(2 * users)]
    # The cache's memory is resident once it was written: so little of it that the warm-up writes all.
    flags += ["--kv-cache-memory-bytes", str(CACHE_BYTES)]
    with running_server(model, *flags) as server:
        command = [sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("streams.py")), "--headless"]
        command += ["--host", server.url, "--users", str(users), "--spawn-rate", str(users), "--stop-timeout", "120"]
        command += [
            "--run-time",
            f"{seconds:.0f}s",
            "--csv",
            str(folder / "load"),
            "--cases",
            str(file),
            "--only-summary",
        ]
        began, rss = time.monotonic(), []
        locust = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        while locust.poll() is None:
            if time.monotonic() - began < seconds:
                rss.append((time.monotonic() - began, _resident_bytes(server.process.pid)))
            time.sleep(max(seconds / 60, 0.2))
        printed = locust.communicate()[0]
        assert server.process.poll() is None, server.log
        assert server.end() == 0, server.log
    with (folder / "load_stats.csv").open() as lines:
        rows = {row["Name"]: row for row in csv.DictReader(lines)}
    assert "stream" in rows, printed
    whole, first = rows["stream"], rows["first token"]
    failed = sum(int(row["Failure Count"]) for name, row in rows.items() if name in ("stream", "left early"))
    num_tokens = sum(
        int(row["Request Count"]) * float(row["Average Content Size"])
        for name, row in rows.items()
        if name in ("stream", "left early")
    )
    if failed:
        click.echo((folder / "load_failures.csv").read_text())
    return LoadResult(
        num_streams=int(whole["Request Count"]) - int(whole["Failure Count"]),
        num_left=int(rows["left early"]["Request Count"]) if "left early" in rows else 0,
        num_failures=failed,
        tokens_per_second=num_tokens / seconds,
        first_token_ms=(float(first["50%"]), float(first["99%"])),
        stream_ms=(float(whole["50%"]), float(whole["99%"])),
        rss=rss,
    )


def _resident_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) * 1024


@click.command()
@click.option("--users", type=int, default=200, show_default=True)
@click.option("--seconds", type=float, default=600.0, show_default=True)
@click.option("--max-tokens", type=int, default=32, show_default=True)
@click.option("--embedded", is_flag=True, help="The embedded model instead of a tiny one.")
def main(users: int, seconds: float, max_tokens: int, embedded: bool) -> None:
    """Run the load and print what it showed."""
    with tempfile.TemporaryDirectory() as folder:
        model = None if embedded else tiny_model(Path(folder) / "model")
        cases = offline_cases(model, num_cases=5 if embedded else 64, max_tokens=max_tokens)
        click.echo(f"{users} users, {seconds:g} s, {len(cases)} prompts of up to {max_tokens} tokens")
        result = run_load(model, cases, Path(folder), users=users, seconds=seconds)
    click.echo(str(result))
    is_good = not result.num_failures and result.growth_bytes < 16 * MIB
    click.echo("held" if is_good else "NOT held")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
