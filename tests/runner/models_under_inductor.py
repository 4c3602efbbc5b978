"""`docs/models_under_inductor.md`: architectures whose tokens equal transformers' with pieces compiled by Inductor.

`python -m tests.runner.models_under_inductor` compiles a tiny model of every architecture that runs, one after the
other, and writes the page anew; with model types as arguments it writes their rows. A model takes 10 to 60 seconds of a
processor.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from piecegraph import LLM, SamplingParams
from piecegraph.compiler.common.report import CompileReport
from tests.runner.architectures import save_tiny, tiny_model
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.models_page import PAGE as ALL_MODELS
from tests.runner.models_page import RUNS, plain, rows_of

PAGE = ALL_MODELS.with_name("models_under_inductor.md")
EQUAL = "equal"
COMMON = [(7 * i + 3) % 97 + 5 for i in range(9)]
PROMPTS = [[*COMMON, *((11 * i + 1) % 89 + 4 for i in range(8))], [9], [*COMMON, 40, 41]]
"""Of several chunks of 5 tokens and of one token; two share two blocks of 4."""

HEAD = """# Models under Inductor

`python -m tests.runner.models_under_inductor` writes this page: a tiny random float32 model of each architecture that \
[models.md](models.md) lists as running, with pieces that Inductor compiles. Its greedy tokens are compared with \
transformers' by the margin rule of the tests: three prompts in chunks of 5 tokens, twice, the second time with cached \
prefixes. `tests/runner/test_models_under_inductor.py` does this for a few; the page has the last run of all.

Of {total} architectures, {equal} give equal tokens with all pieces compiled. A piece that Inductor does not compile \
runs eagerly, with equal tokens, too. torch {torch}, transformers {transformers}, CPU.

| model type | tokens | unique pieces |
|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One architecture: whether its tokens are equal, or what came instead, and how many pieces were compiled."""

    model_type: str
    answer: str  # EQUAL, alone or with what Inductor raised for a piece, or the beginning of an error
    num_unique_pieces: str

    def line(self) -> str:
        """Return the row of the page's table."""
        return f"| {self.model_type} | {self.answer} | {self.num_unique_pieces} |"


def compiled(model_type: str, folder: Path) -> CompileReport:
    """Compile a tiny model of an architecture, compare its tokens, and return the report of its pieces.

    Raises `AssertionError` if a token differs.
    """
    model = tiny_model(model_type)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(
        save_tiny(model_type, model, folder),
        dtype="float32",
        device="cpu",
        compiler="inductor",
        compile_workers=0,
        skip_tokenizer_init=True,
        block_size=4,
        max_model_len=40,
        max_num_batched_tokens=5,
        max_num_seqs=4,
    ) as llm:
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert_same_tokens(model, prompt, output.outputs[0].token_ids)
        assert llm.engine.stats.num_prefix_hits > 0
        return llm.compiled.report()


def row_of(model_type: str) -> Row:
    """Return what comes of an architecture under Inductor."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = compiled(model_type, Path(folder))
            answer = EQUAL
            for reason in list(report.eager_pieces.values())[:1]:
                raised = re.search(r"Inductor failed: (\w+)", reason)
                answer += f", but a piece runs eagerly: {raised[1] if raised else reason.partition(':')[0]}"
            return Row(model_type, answer, str(report.num_unique_pieces))
        except Exception as error:  # a survey goes on, whatever one model raises
            return Row(model_type, f"{type(error).__name__}: {plain(error)}", "")


def page_rows(page: str) -> dict[str, Row]:
    """Return the rows of a page, by model type."""
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| model type")]
    rows = [Row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in lines]
    return {row.model_type: row for row in rows}


def page_of(rows: Mapping[str, Row]) -> str:
    """Return the page."""
    ordered = [rows[name] for name in sorted(rows)]
    head = HEAD.format(
        equal=sum(row.answer == EQUAL for row in ordered),
        total=len(ordered),
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
    )
    return head + "\n".join(row.line() for row in ordered) + "\n"


def running() -> list[str]:
    """Return the model types that run, by docs/models.md."""
    rows = rows_of(ALL_MODELS.read_text(encoding="utf-8"))
    return [row.model_type for row in rows.values() if row.answer == RUNS]


def main(names: Iterable[str]) -> None:
    """Write the page with new rows for `names`, or for all that run; after each model, since all take an hour."""
    known = page_rows(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    allowed = running()
    for name in names or allowed:
        start = time.monotonic()
        known[name] = row_of(name)
        sys.stderr.write(f"{known[name].line()} {time.monotonic() - start:.0f} s\n")
        PAGE.write_text(page_of({each: row for each, row in known.items() if each in allowed}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
