"""The command `piecegraph cache sizes`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from piecegraph.paths import TRAFFIC
from piecegraph.runner.cudagraphs.capture_sizes import (
    SMALL_MIXED_SIZES,
    check_capture_sizes,
    default_capture_sizes,
)
from piecegraph.runner.traffic.kept import Kept, read_all
from piecegraph.runner.traffic.pick_sizes import cost_model, pick_sizes, total_cost
from piecegraph.runner.traffic.traffic_sizes import histogram_of
from piecegraph.tools.cache.terminal.output import emit, printable
from piecegraph.tools.cache.terminal.place import Place, cache_options
from piecegraph.tools.command_line.options import CONTEXT, SIZES, Command


@dataclass(frozen=True, slots=True)
class Choice:
    """Sizes to capture, and what the counted steps cost with them compared with the default ladder."""

    name: str
    sizes: tuple[int, ...]
    mixed_sizes: tuple[int, ...]  # of batches that are no uniform decode, where FULL has graphs of decode
    saved: float  # share of the time of the default ladder


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The counted steps of a model, and the choices of sizes for them."""

    kept: Kept
    choices: tuple[Choice, ...]
    is_measured: bool


@click.command(cls=Command, context_settings=CONTEXT)
@click.option("--sizes", type=SIZES, help="Compare these sizes, too: 1,2,4,8.")
@cache_options
def command(place: Place, as_json: bool, sizes: tuple[int, ...] | None) -> None:
    """Show the batch shapes of engines, and what other sizes of graphs would save.

    Engines count the shapes of their steps and add them up here when they are closed. Savings are of measured times
    where a start has measured its graphs (--measure-graphs), else of padded tokens.
    """
    found = [model_sizes(kept, sizes) for kept in read_all(place.root / TRAFFIC) if kept.decode or kept.mixed]
    if not found:
        click.echo(f"no engine has counted its batches yet in the cache at {place.root}", err=True)
    lines = (line for model in found for line in as_lines(model))
    emit([as_record(model) for model in found], lines, as_json=as_json)


def model_sizes(kept: Kept, others: Sequence[int] | None) -> ModelSizes:
    """Return the default ladder, the sizes for the traffic, and `others`, each with what it saves.

    Raises `ConfigError` for `others` that are no sizes.
    """
    top = kept.max_num_tokens
    histogram, model = histogram_of(kept, max_num_seqs=kept.max_num_seqs, max_num_tokens=top), cost_model(kept.times)
    default = default_capture_sizes(top)
    chosen = {"default": default, "traffic": pick_sizes(histogram, count=len(default), model=model)}
    if others is not None:
        check_capture_sizes(others, top)
        chosen["given"] = tuple(others)
    mixed = chosen | {"default": default_capture_sizes(top, SMALL_MIXED_SIZES)}
    costs = {name: total_cost(histogram, sizes, model, mixed[name]) for name, sizes in chosen.items()}
    choices = tuple(
        Choice(name, sizes, mixed[name], 1 - costs[name] / costs["default"]) for name, sizes in chosen.items()
    )
    return ModelSizes(kept, choices, model.is_measured)


def as_record(model: ModelSizes) -> dict[str, Any]:
    kept = model.kept
    return {
        "key": kept.key,
        "model": kept.model,
        "device": kept.device,
        "decode": {str(size): count for size, count in sorted(kept.decode.items())},
        "mixed": {str(size): count for size, count in sorted(kept.mixed.items())},
        "is_measured": model.is_measured,
        "choices": [
            {
                "name": choice.name,
                "sizes": list(choice.sizes),
                "mixed_sizes": list(choice.mixed_sizes),
                "saved": choice.saved,
            }
            for choice in model.choices
        ],
    }


def as_lines(model: ModelSizes) -> Iterator[str]:
    kept = model.kept
    yield f"{printable(kept.model)} on {printable(kept.device)}"
    default = model.choices[0]
    for title, unit, steps, ladder in (
        ("decode", "requests", kept.decode, default.sizes),
        ("other", "tokens", kept.mixed, default.mixed_sizes),
    ):
        for size, count in ladder_counts(steps, ladder).items():
            share = count / sum(steps.values())
            yield f"  {title:<7} up to {size:>6} {unit:<8} {count:>9} steps {share:>6.1%}"
    by = "measured times" if model.is_measured else "padded tokens; --measure-graphs would measure times"
    for choice in model.choices:
        sizes, others = (",".join(map(str, each)) for each in (choice.sizes, choice.mixed_sizes))
        yield f"  {choice.name:<7} saves {choice.saved:>6.1%}  {sizes}{'' if sizes == others else f'; other {others}'}"
    yield f"  savings are of {by}"


def ladder_counts(steps: Mapping[int, int], ladder: Sequence[int]) -> dict[int, int]:
    """Return the steps by the smallest size of `ladder` that holds them; sizes without steps are left out."""
    counts: dict[int, int] = {}
    for shape, count in sorted(steps.items()):
        size = next((size for size in ladder if size >= shape), shape)
        counts[size] = counts.get(size, 0) + count
    return counts
