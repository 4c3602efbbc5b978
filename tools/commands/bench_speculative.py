"""The command `piecegraph bench speculative`: tokens a second with and without drafts, in one run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from piecegraph.errors import ConfigError
from piecegraph.tools.bench.session import about, bench_arguments, bench_start, output_flags
from piecegraph.tools.command_line.compile_flags import with_compile_flags
from piecegraph.tools.command_line.options import COMPILE_FLAGS, CONTEXT, LLM_FLAGS, Command, flags

if TYPE_CHECKING:
    from piecegraph.tools.bench.speculative import SpeculativeRow

EPILOG = """\b
Examples:
  piecegraph bench speculative ./my-model --num-speculative-tokens 4
  piecegraph bench speculative ./my-model --draft ./my-small-model --prompt "Repeat after me: one two three,"
  piecegraph bench speculative ./my-model --eagle3 ./its-head --num-speculative-tokens 3
  piecegraph bench speculative shape:llama-8b --draft shape:llama-8b:16 --synthetic-acceptance-length 2.5"""

PROMPTS = (
    "Repeat after me, three times: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that returns the n-th Fibonacci number, then explain it line by line.",
    "The capital of France is",
)
"""What is answered unless prompts are given: one that repeats, one with structure, one free."""

RANDOM_PROMPTS = 3
"""The number of prompts for random weights, which have no tokenizer, unless one is given."""

RANDOM_PROMPT_TOKENS = 64
"""The length of each."""


@click.command("speculative", cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("model")
@click.option("--draft", help="A model that drafts: its folder, .gguf file, hub id or shape:NAME.")
@click.option("--eagle3", help="An EAGLE-3 head that drafts: its folder or hub id; shape:NAME is a random one.")
@click.option("--mtp", is_flag=True, help="The model's own layer for multi-token prediction drafts.")
@click.option(
    "--synthetic-acceptance-length",
    type=click.FloatRange(min=1),
    help="Tokens that a verification gives in the mean, whatever the model says: for random weights. Answers mean "
    "nothing then and are not compared.",
)
@click.option(
    "--num-speculative-tokens",
    "counts",
    type=click.IntRange(min=1),
    multiple=True,
    default=(2, 4),
    show_default=True,
    help="Drafts of a request in a step; one or several.",
)
@click.option("--prompt", "prompts", multiple=True, help="What is answered, all at once; one or several texts.")
@click.option(
    "--num-requests",
    type=click.IntRange(min=1),
    help=f"Requests at once, for random weights. [default: {RANDOM_PROMPTS}]",
)
@click.option("--output-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Of each answer.")
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each kind.")
@flags(LLM_FLAGS)
@flags(COMPILE_FLAGS)
@output_flags
def speculative(
    model: str,
    draft: str | None,
    eagle3: str | None,
    mtp: bool,
    synthetic_acceptance_length: float | None,
    counts: tuple[int, ...],
    prompts: tuple[str, ...],
    num_requests: int | None,
    output_tokens: int,
    repeat: int,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **values: Any,
) -> None:
    """Measure tokens a second of MODEL with and without drafts, by method and number of drafts.

    The answers are greedy, and each kind of drafts has to give those of the run without: if two tokens differ that do
    not nearly tie, there is no figure. Acceptance stands beside each figure. MODEL may be shape:NAME, whose random
    weights accept hardly any draft of another model; --synthetic-acceptance-length says how many are accepted instead.
    """
    arguments = bench_arguments(model, values)
    if "speculative_config" in arguments:
        raise ConfigError("--speculative-config: this bench sets it itself; use --draft and --num-speculative-tokens.")
    arguments["skip_tokenizer_init"] = is_random = model.startswith("shape:")
    if is_random and prompts:
        raise ConfigError("--prompt: random weights have no tokenizer; leave it out.")
    if num_requests is not None and not is_random:
        raise ConfigError("--num-requests: it is for the random prompts of a shape:NAME; give --prompt several times.")
    with bench_start(model, quiet=quiet, debug=debug) as begun:
        from piecegraph.runner.llm import LLM
        from piecegraph.tools.bench.measure.offline_workload import make_workload
        from piecegraph.tools.bench.speculative import NO_DRAFTS, answers, measure
        from piecegraph.tools.command_line.shapes import head_folder, model_folder

        display, arguments = begun.display, with_compile_flags(arguments, values)
        rows: list[SpeculativeRow] = []

        def show(row: SpeculativeRow) -> None:
            rows.append(row)
            if not as_json:
                click.echo(as_line(row, rows[0]))

        with LLM(begun.folder, on_phase=begun.on_phase, **arguments) as llm:
            vocab_size = llm.engine.vocab_size
            lengths = RANDOM_PROMPT_TOKENS, RANDOM_PROMPT_TOKENS
            asked: list[Any] = list(prompts or PROMPTS)
            if is_random:
                number = RANDOM_PROMPTS if num_requests is None else num_requests
                work = make_workload(number, lengths, (1, 1), vocab_size=vocab_size, seed=0)
                asked = [{"prompt_token_ids": prompt} for prompt in work.prompts]
            expected = answers(llm, asked, output_tokens, logprobs=2)
            display.stop()
            if not as_json:
                click.echo(HEADER)
            options: dict[str, Any] = {"repeat": repeat, "expected": expected}
            show(measure(llm, asked, output_tokens, method=NO_DRAFTS, num_drafts=0, **options))
            record = {"model": model, "draft": draft, "output_tokens": output_tokens, **about(llm, display)}
        draft = None if draft is None else model_folder(draft, begun.scratch)
        eagle3 = None if eagle3 is None else head_folder(eagle3, begun.scratch)
        for config in kinds(draft, counts, eagle3=eagle3, mtp=mtp, synthetic_length=synthetic_acceptance_length):
            method, count = config["method"], config["num_speculative_tokens"]
            with LLM(begun.folder, speculative_config=config, **arguments) as llm:
                show(measure(llm, asked, output_tokens, method=method, num_drafts=count, **options))
        if as_json:
            click.echo(json.dumps({**record, "rows": [row.as_record() for row in rows]}))


def kinds(
    draft: str | None,
    counts: tuple[int, ...],
    *,
    eagle3: str | None = None,
    mtp: bool = False,
    synthetic_length: float | None = None,
) -> list[dict[str, Any]]:
    """Return the `speculative_config` of each row behind the first."""
    methods: list[dict[str, Any]] = [{"method": "ngram"}]
    if draft is not None:
        methods.append({"method": "draft_model", "model": draft})
    if eagle3 is not None:
        methods.append({"method": "eagle3", "model": eagle3})
    if mtp:
        methods.append({"method": "mtp"})
    synthetic: dict[str, Any] = {}
    if synthetic_length is not None:
        synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": synthetic_length}
    return [
        {**method, **synthetic, "num_speculative_tokens": count, "stops_when_slower": False}
        for method in methods
        for count in counts
    ]


HEADER = (
    f"{'method':>12} {'k':>3} {'tok/s':>9} {'speed-up':>8} {'ms a step':>9} {'accepted':>8} {'tokens a step':>13} "
    f"{'ties':>4}"
)


def as_line(row: SpeculativeRow, without: SpeculativeRow) -> str:
    """Return a row of the table; the speed-up is over `without`, the row without drafts."""
    drafted = row.speculation
    rate = "" if drafted is None or drafted.acceptance_rate is None else f"{drafted.acceptance_rate:.0%}"
    mean = "" if drafted is None or drafted.mean_acceptance_length is None else f"{drafted.mean_acceptance_length:.2f}"
    ms = "" if row.ms_per_step is None else f"{row.ms_per_step:.3f}"
    return (
        f"{row.method:>12} {row.num_drafts or '':>3} {row.tokens_per_s:>9.1f} "
        f"{row.tokens_per_s / without.tokens_per_s:>8.2f} {ms:>9} {rate:>8} {mean:>13} {row.num_ties:>4}"
        f"{'  synthetic acceptance' if row.is_synthetic else ''}"
    )
