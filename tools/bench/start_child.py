"""One start in a process of its own: `python -m piecegraph.tools.bench.start_child JOB`, from the interpreter to the
first token.

JOB is a `StartJob` as JSON. The last line of stdout is a `StartRecord` as JSON; a failure is a line on stderr and the
exit code that the command line has for it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from piecegraph.progress import timed_phase
from piecegraph.tools.bench.start_clock import ImportSpans, PhaseSpans, Span

PROMPT = "The capital of France is"
PROMPT_TOKEN_IDS = tuple(range(1, 17))
"""For a model without a tokenizer; the vLLM bench's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartJob:
    """What to start."""

    began: float  # `time.monotonic` when the process was asked for
    model: str
    arguments: dict[str, Any]  # of `LLM`


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """What a start came to."""

    begin: float
    end: float  # the first token is on the host
    spans: list[Span]
    report: dict[str, Any]  # the compile report
    graphs: dict[str, Any]  # by mode, and `device_bytes`, what all of them took of a GPU
    notes: list[str]


def start(job: StartJob, ready: float) -> StartRecord:
    """Start the model and draw one token. `ready`: when the interpreter began to run this."""
    phases, imports = PhaseSpans(), ImportSpans()
    with imports.measured():
        from piecegraph.runner.llm import LLM
        from piecegraph.runner.sampling_params import SamplingParams

        with LLM(job.model, on_phase=phases, **job.arguments) as llm:
            prompt: Any = PROMPT if llm.tokenizer is not None else {"prompt_token_ids": list(PROMPT_TOKEN_IDS)}
            params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
            with timed_phase(phases, "first_token"):
                next(iter(llm.stream(prompt, params)))
            end = time.monotonic()
            return StartRecord(
                begin=job.began,
                end=end,
                spans=[Span("interpreter", job.began, ready), *phases.spans, *imports.spans],
                report=llm.compiled.report().as_dict(),
                graphs={**llm.runner.graphs.summary(), "device_bytes": llm.runner.graphs.device_bytes},
                notes=[*llm.notes, *_layers_that_ran(llm.runner.graphs.not_copied())],
            )


def _layers_that_ran(reasons: Mapping[str, int]) -> list[str]:
    return [f"every layer ran for {count} of the graphs, none is a copy: {why}" for why, count in reasons.items()]


def main() -> int:
    ready = time.monotonic()
    from piecegraph.tools.failures import exit_code_of, show

    try:
        record = start(StartJob(**json.loads(sys.argv[1])), ready)
    except Exception as error:
        show(error, debug=False)
        return exit_code_of(error)
    sys.stdout.write(json.dumps(asdict(record), default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
