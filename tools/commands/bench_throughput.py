"""The command `piecegraph bench throughput`: an offline workload as users run one, through `LLM.generate`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from piecegraph.errors import ConfigError
from piecegraph.tools.bench.measure.offline_workload import make_workload
from piecegraph.tools.bench.session import about, bench_arguments, bench_start, ceilings_line, output_flags
from piecegraph.tools.command_line.compile_flags import with_compile_flags
from piecegraph.tools.command_line.options import COMPILE_FLAGS, CONTEXT, LLM_FLAGS, RANGE, Command, flags

if TYPE_CHECKING:
    from piecegraph.tools.bench.step_profile import StepProfile
    from piecegraph.tools.bench.throughput import ThroughputRow

EPILOG = """\b
Examples:
  piecegraph bench throughput shape:qwen3-0.6b --repeat 3
  piecegraph bench throughput shape:qwen3-0.6b --num-requests 64 --shared-prefix 2048 --output-tokens 16
  piecegraph bench throughput ./my-model --temperature 0 --profile --json"""


@click.command("throughput", cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("model")
@click.option("--num-requests", type=click.IntRange(min=1), default=256, show_default=True, help="All there at once.")
@click.option("--prompt-tokens", type=RANGE, default="100:1024", show_default=True, help="Tokens of a prompt: a range.")
@click.option(
    "--output-tokens", type=RANGE, default="100:1024", show_default=True, help="Tokens of an answer: a range."
)
@click.option(
    "--shared-prefix",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Tokens with which every prompt begins, on top of its own.",
)
@click.option(
    "--temperature",
    "temperatures",
    type=click.FloatRange(min=0),
    multiple=True,
    default=(0.0, 0.6),
    show_default=True,
    help="How tokens are drawn, 0: the likeliest; one or several.",
)
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Runs at each temperature.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts and lengths.")
@click.option(
    "--profile",
    "is_profiled",
    is_flag=True,
    help="Besides, run again with a clock around the host's work in each step; on a GPU, how long that idles.",
)
@flags(LLM_FLAGS)
@flags(COMPILE_FLAGS)
@output_flags
def throughput(
    model: str,
    num_requests: int,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    shared_prefix: int,
    temperatures: tuple[float, ...],
    repeat: int,
    seed: int,
    is_profiled: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **values: Any,
) -> None:
    """Measure tokens a second of MODEL on an offline workload, by temperature.

    MODEL is a folder, a .gguf file, a hub id, or shape:NAME for random weights in a published shape (qwen3-0.6b,
    llama-8b). The workload is that of nano-vllm's bench: prompts are random token ids, answers are as long as asked
    for and are not detokenized. The floor reads the weights once in each of the fewest possible steps, or multiplies
    by them, and reads every cached key for every token, at the rates measured in the same run. With
    --data-parallel-size the requests go through the front door to several engines; figures are of all together.
    """
    arguments = bench_arguments(model, values, takes_engines=True)
    num_engines = _num_engines(arguments, is_profiled)
    arguments.setdefault("max_model_len", shared_prefix + prompt_tokens[1] + output_tokens[1])
    with bench_start(model, quiet=quiet, debug=debug) as begun:
        from piecegraph.runner.llm import LLM
        from piecegraph.tools.command_line.records import as_plain

        display, arguments = begun.display, with_compile_flags(arguments, values)
        with LLM(begun.folder, skip_tokenizer_init=True, on_phase=begun.on_phase, **arguments) as llm:
            from piecegraph.tools.bench.measure.engines import measure_engines
            from piecegraph.tools.bench.step_profile import profile_steps
            from piecegraph.tools.bench.throughput import WARM_UP, measure_throughput, throughput_notes

            ceilings = measure_engines(llm)
            workload = make_workload(
                num_requests,
                prompt_tokens,
                output_tokens,
                shared_prefix=shared_prefix,
                vocab_size=llm.engine.vocab_size,
                seed=seed,
            )
            display.stop()
            if not as_json:
                click.echo(HEADER)
            rows = measure_throughput(
                llm,
                workload,
                temperatures,
                ceilings=ceilings,
                repeat=repeat,
                on_row=lambda row: None if as_json else click.echo(as_line(row)),
            )
            profiles = profile_steps(llm, workload, temperatures, ceilings=ceilings) if is_profiled else []
            notes = (*llm.notes, *throughput_notes(num_engines))
            if as_json:
                record = {
                    "model": model,
                    "workload": {
                        "num_requests": num_requests,
                        "prompt_tokens": prompt_tokens,
                        "output_tokens": output_tokens,
                        "shared_prefix": shared_prefix,
                        "seed": seed,
                    },
                    "warm_up": WARM_UP,
                    "ceilings": as_plain(ceilings),
                    "rows": [as_plain(row.as_record()) for row in rows],
                    "profiles": as_plain(profiles),
                    **about(llm, display),
                    "notes": notes,
                }
                click.echo(json.dumps(record))
                return
            click.echo("\n".join([*map(as_lines, profiles), ceilings_line(ceilings), f"warm-up: {WARM_UP}"]))
            for note in notes:
                click.echo(f"note: {note}", err=True)


def _num_engines(arguments: dict[str, Any], is_profiled: bool) -> int:
    """Return the number of engines. Raises `ConfigError` for a profile of several."""
    num_engines = int(arguments.get("data_parallel_size", 1))
    if num_engines > 1 and is_profiled:
        raise ConfigError(
            "--profile has a clock around the host's work of one engine, in its process; leave it or "
            "data_parallel_size out."
        )
    return num_engines


HEADER = (
    f"{'temp':>5} {'seconds':>8} {'min':>8} {'max':>8} {'out tok/s':>9} {'all tok/s':>9} {'steps':>6} {'batch':>6} "
    f"{'cached':>6} {'preempted':>9} {'floor s':>8} {'of floor':>8}  modes"
)


def as_line(row: ThroughputRow) -> str:
    """Return a row of the table; seconds are the median run's, beside the fastest's and the slowest's."""
    it: dict[str, Any] = row.as_record()
    modes = ", ".join(f"{mode} {count}" for mode, count in sorted(it["steps_by_mode"].items()))
    return (
        f"{it['temperature']:>5g} {it['seconds']:>8.3f} {it['seconds_min']:>8.3f} {it['seconds_max']:>8.3f} "
        f"{it['output_tokens_per_s']:>9.0f} {it['total_tokens_per_s']:>9.0f} {it['steps']:>6} "
        f"{it['mean_batch']:>6.1f} {it['prefix_hit_rate']:>6.0%} {it['preemptions']:>9} {it['floor_s']:>8.3f} "
        f"{it['share_of_floor']:>8.0%}  {modes}"
    )


def as_lines(profile: StepProfile) -> str:
    """Return a profile as a table of the host's parts, and a line for the GPU."""
    title = f"profile at temperature {profile.temperature:g}: {profile.steps} decode steps of {profile.batch_size}"
    parts = {"step": profile.step_ms, "host": profile.host_ms, **profile.parts_ms}
    lines = [
        f"{title}, floor {profile.floor_ms:.3f} ms ({profile.floor_ms / profile.step_ms.mean:.0%} of the mean step)",
        f"  {'ms':<14} {'mean':>8} {'p90':>8}",
        *(f"  {name.replace('_', ' '):<14} {part.mean:>8.3f} {part.p90:>8.3f}" for name, part in parts.items()),
    ]
    if profile.gpu is not None:
        idle = profile.gpu
        lines.append(
            f"  GPU idle {idle.idle_share:.1%} of {idle.steps} steps ({idle.window_ms:.1f} ms); "
            f"{idle.idle_share_between_launches:.1%} in pauses longer than those within a graph"
        )
    return "\n".join(lines)
