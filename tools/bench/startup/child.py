"""One start in a process of its own, from the interpreter to the first token.

The command is `python -m piecegraph.tools.bench.startup.child JOB`. JOB is a `StartJob` as JSON. The last line of
stdout is a `StartRecord` as JSON; a failure is a line on stderr and the exit code that the command line has for it.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from piecegraph.progress import timed_phase
from piecegraph.tools.bench.startup.clock import ImportSpans, PhaseSpans, Span

PROMPT = "The capital of France is"
PROMPT_TOKEN_IDS = tuple(range(1, 17))
"""The prompt of a model without a tokenizer; it has the length of the vLLM bench's prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartJob:
    """A start to measure."""

    began: float  # `time.monotonic` when the process was asked for
    model: str
    arguments: dict[str, Any]  # of `LLM`


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """The result of a start."""

    begin: float
    end: float  # the first token is on the host
    full_speed: float  # everything is compiled and captured
    spans: list[Span]
    report: dict[str, Any]  # the compile report
    graphs: dict[str, Any]  # by mode, and `device_bytes`, what all of them took of a GPU
    notes: list[str]


def start(job: StartJob, ready: float) -> StartRecord:
    """Start the model and draw one token. `ready` is the time at which the interpreter began to run this module."""
    phases, imports = PhaseSpans(), ImportSpans()
    is_fast = job.arguments.get("start") == "fast"
    with imports.measured():
        from piecegraph.runner.common.sampling_params import SamplingParams
        from piecegraph.runner.llm import LLM

        with LLM(job.model, on_phase=phases, **job.arguments) as llm:
            prompt: Any = PROMPT if llm.tokenizer is not None else {"prompt_token_ids": list(PROMPT_TOKEN_IDS)}
            params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
            with timed_phase(phases, "first_token"):
                next(iter(llm.stream(prompt, params)))
            end = time.monotonic()
            llm.finish_start()
            return StartRecord(
                begin=job.began,
                end=end,
                full_speed=time.monotonic() if is_fast else end,
                spans=[Span("interpreter", job.began, ready), *phases.spans, *imports.spans],
                report=llm.report.as_dict(),
                graphs={**llm.runner.graphs.summary(), "device_bytes": llm.runner.graphs.device_bytes},
                notes=list(llm.notes),
            )


def main() -> int:
    ready = time.monotonic()
    from piecegraph.tools.command_line.failures import exit_code_of, show

    try:
        record = start(StartJob(**json.loads(sys.argv[1])), ready)
    except Exception as error:
        show(error, debug=False)
        return exit_code_of(error)
    sys.stdout.write(json.dumps(asdict(record), default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
