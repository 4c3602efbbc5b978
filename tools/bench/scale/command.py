"""The command `piecegraph bench scale`: a trace of requests on 1 to 1,024 GPUs, simulated without any."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from piecegraph.errors import ConfigError
from piecegraph.tools.bench.scale.layout_cost import ASSUMPTIONS, Link, ModelSize, RankTimes, StepTimes, layouts
from piecegraph.tools.bench.scale.simulate import Arrival, ScaleRow, poisson_trace, simulate
from piecegraph.tools.bench.session import bench_start
from piecegraph.tools.command_line.options import CONTEXT, Command

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MOST_GPUS = 1024

EPILOG = """\b
Examples (step times of one device are those of `piecegraph bench latency`, in milliseconds):
  piecegraph bench scale shape:llama-8b --step-time 1:4.03 --step-time 32:4.77 --step-time 256:11.9
  piecegraph bench scale ./my-model --step-time 1:0.66 --step-time 256:5.25 --rate 50 --gpus 8 --all
Those of the share of one of two ranks are those of `piecegraph bench latency --shard-of 2`:
  piecegraph bench scale ./my-model --step-time 1:0.66 --shard-step-time 1:0.45
Alpha and beta are fitted to the sums that a start of several ranks measures and prints:
  piecegraph bench scale ./my-model --step-time 1:0.66 --sum-time 8192:1.8 --sum-time 2097152:13.3"""


def parse_times(given: Sequence[str], option: str, form: str, per_second: float) -> dict[int, float]:
    """Return the seconds of `COUNT:TIME` texts of an option by their counts, which are 1 or more.

    `form` names the two, with an example; `per_second` is the number of units of time in a second. Raises
    `ConfigError`.
    """
    found: dict[int, float] = {}
    for text in given:
        counted, _, time = text.partition(":")
        try:
            count, seconds = int(counted), float(time) / per_second
        except ValueError:
            count, seconds = 0, 0.0
        if count < 1 or not 0 < seconds < float("inf"):
            raise ConfigError(f"{option} {text!r} is not {form}.")
        found[count] = seconds
    return found


def parse_step_times(given: Sequence[str], option: str = "--step-time") -> StepTimes:
    """Return the times of `TOKENS:MILLISECONDS` texts of an option. Raises `ConfigError`."""
    found = parse_times(given, option, "TOKENS:MILLISECONDS of a measured step, both above 0; e.g. 32:4.77", 1e3)
    if not found:
        raise ConfigError(
            "there are no step times: give one --step-time TOKENS:MILLISECONDS for each that `piecegraph bench "
            "latency` has measured on one device."
        )
    return StepTimes(tuple(sorted(found)), tuple(seconds for _, seconds in sorted(found.items())))


def link_of(sums: Sequence[str], num_ranks: int, alpha_us: float, beta_gb_per_s: float) -> Link:
    """Return the link that `--sum-time` texts of `num_ranks` ranks are fitted by, or the one that is given.

    Raises `ConfigError`.
    """
    if not sums:
        return Link(alpha_s=alpha_us / 1e6, bytes_per_s=beta_gb_per_s * 1e9)
    form = "BYTES:MICROSECONDS of a measured sum, both above 0; e.g. 8192:1.8"
    try:
        return Link.fitted(parse_times(sums, "--sum-time", form, 1e6), num_ranks)
    except ValueError as error:
        raise ConfigError(f"alpha and beta cannot be fitted to --sum-time: {error}.") from error


def read_trace(file: Path) -> list[Arrival]:
    """Return the requests of a file of JSON lines, `{"at_s": 0.5, "prompt_tokens": 512, "output_tokens": 128}` each.

    Raises `ConfigError`, which names the line.
    """
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            fields = json.loads(line)
            arrival = Arrival(float(fields["at_s"]), int(fields["prompt_tokens"]), int(fields["output_tokens"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{file}, line {number} is no request ({type(error).__name__}: {error}); each line is an object with "
                "at_s, prompt_tokens and output_tokens."
            ) from error
        if arrival.at_s < 0 or arrival.prompt_tokens < 1 or arrival.output_tokens < 1:
            raise ConfigError(f"{file}, line {number}: at_s must be 0 or more, and the numbers of tokens 1 or more.")
        found.append(arrival)
    if not found:
        raise ConfigError(f"{file} has no line, so there is no request to simulate.")
    return sorted(found, key=lambda each: each.at_s)


def model_size(config: PretrainedConfig, itemsize: int) -> ModelSize:
    """Return the sizes of a transformers model by its config; values have `itemsize` bytes."""
    text = config.get_text_config(decoder=True)
    return ModelSize(
        num_layers=text.num_hidden_layers,
        hidden_bytes=text.hidden_size * itemsize,
        logits_bytes=text.vocab_size * itemsize,
    )


def scale_lines(
    rows: Sequence[ScaleRow], times: RankTimes, link: Link, size: ModelSize, trace: Sequence[Arrival]
) -> list[str]:
    """Return the table of a simulation, with what it assumes."""
    lines = [f"{len(trace)} requests, {sum(each.output_tokens for each in trace)} tokens of output; simulated"]
    lines.append(f"{'GPUs':>5}  {'layout':24}  {'tokens/s':>12}  {'first token':>11}  {'latency':>9}  {'99 %':>9}")
    for row in rows:
        lines.append(
            f"{row.layout.num_gpus:5}  {row.layout!s:24}  {row.tokens_per_s:12,.1f}  {row.mean_first_token_s:9.3f} s  "
            f"{row.mean_latency_s:7.3f} s  {row.p99_latency_s:7.3f} s"
        )
    lines.append(
        f"alpha {link.alpha_s * 1e6:g} us, beta {link.bytes_per_s / 1e9:g} GB/s; {size.num_layers} layers, "
        f"{size.hidden_bytes} bytes of hidden states a token, {size.logits_bytes} of logits a request"
    )
    return [*lines, "assumptions:", *(f"- {each}" for each in (times.assumption, *ASSUMPTIONS))]


@click.command("scale", cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("model", required=False)
@click.option("--step-time", "step_times", multiple=True, help="TOKENS:MILLISECONDS of a measured step on one device.")
@click.option("--shard-step-time", "shard_step_times", multiple=True, help="The same, of the share of one rank alone.")
@click.option("--shards", type=click.IntRange(2, 64), default=2, show_default=True, help="Ranks of that share.")
@click.option("--sum-time", "sums", multiple=True, help="BYTES:MICROSECONDS of a sum over --shards ranks; fits both:")
@click.option("--alpha-us", type=click.FloatRange(min=0), default=10.0, show_default=True, help="Of a message.")
@click.option("--beta-gb-per-s", type=click.FloatRange(min=1e-6), default=300.0, show_default=True, help="Of a link.")
@click.option("--itemsize", type=click.IntRange(1, 8), default=2, show_default=True, help="Bytes of a value sent.")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Arrivals, as JSON lines.")
@click.option("--num-requests", type=click.IntRange(min=1), default=1024, show_default=True, help="Without --trace.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Requests a second; without it all at once.")
@click.option("--input-len", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--output-len", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens of an answer.")
@click.option("--gpus", type=click.IntRange(1, MOST_GPUS), help="Only this number, a power of two.")
@click.option("--all", "shows_all", is_flag=True, help="Every layout, not only the one with the most tokens a second.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the arrivals.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str | None, as_json: bool, shows_all: bool, **values: Any) -> None:
    """Simulate a trace of requests on 1 to 1,024 GPUs by TP x PP x DP, without hardware.

    A step's time comes from measured ones, collectives from an alpha-beta model; assumptions are printed. MODEL is only
    read for its sizes.
    """
    shard = parse_step_times(values["shard_step_times"], "--shard-step-time") if values["shard_step_times"] else None
    times = RankTimes(whole=parse_step_times(values["step_times"]), shard=shard, num_shards=values["shards"])
    link = link_of(values["sums"], values["shards"], values["alpha_us"], values["beta_gb_per_s"])
    trace = read_trace(values["trace"]) if values["trace"] is not None else None
    if trace is None:
        lengths = values["input_len"], values["output_len"]
        trace = poisson_trace(values["num_requests"], values["rate"], *lengths, values["seed"])
    counts = [2**power for power in range(11)] if values["gpus"] is None else [values["gpus"]]
    if counts[0] & (counts[0] - 1):
        raise ConfigError(f"--gpus {counts[0]} is no power of two.")
    with bench_start(model or "", quiet=True, debug=False) as begun:
        size = model_size(config_of(begun.folder), values["itemsize"])
    rows = []
    for count in counts:
        found = [simulate(trace, layout, times, size, link) for layout in layouts(count)]
        found.sort(key=lambda row: row.tokens_per_s, reverse=True)
        rows += found if shows_all else found[:1]
    if as_json:
        assumptions = [times.assumption, *ASSUMPTIONS]
        record = {"rows": [row.as_record() for row in rows], "assumptions": assumptions, "model": model}
        click.echo(json.dumps({**record, "alpha_s": link.alpha_s, "bytes_per_s": link.bytes_per_s}))
    else:
        click.echo("\n".join(scale_lines(rows, times, link, size, trace)))


def config_of(folder: str | Path) -> PretrainedConfig:
    """Return the config of a model; "" is the embedded one."""
    from piecegraph.runner.common.model_source import ModelSource
    from piecegraph.runner.models.config.load_config import load_config
    from piecegraph.runner.models.embedded_model import embedded_model_dir

    return load_config(ModelSource(model=str(folder or embedded_model_dir())))
