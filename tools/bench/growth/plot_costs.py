"""Draw plots of how cost grows, one SVG file each.

`python -m piecegraph.tools.bench.growth.plot_costs growth.json docs/figures` writes them.

The file is what `python -m piecegraph.tools.bench.growth.growth` measured, or any JSON object with the same `plots`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from piecegraph.errors import ConfigError
from piecegraph.tools.bench.growth.svg_plot import Line, Plot, as_svg


def as_plot(record: Mapping[str, Any]) -> Plot:
    """Return the plot that a JSON object describes. Raises `KeyError` or `TypeError` if it describes none."""
    lines = tuple(
        Line(
            name=str(line["name"]),
            points=tuple((float(x), float(y)) for x, y in line["points"]),
            is_reference=bool(line.get("is_reference", False)),
        )
        for line in record["lines"]
    )
    return Plot(
        name=str(record["name"]),
        title=str(record["title"]),
        x=str(record["x"]),
        y=str(record["y"]),
        lines=lines,
        is_log=bool(record.get("is_log", True)),
    )


def where_from(record: Mapping[str, Any]) -> str:
    """Return the model, the device and the versions in one line."""
    environment = record.get("environment", {})
    versions = environment.get("packages", {})
    parts = [
        record.get("model"),
        environment.get("gpus") or environment.get("cpu"),
        *(f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions),
    ]
    return ", ".join(str(part) for part in parts if part)


def write_plots(file: Path, folder: Path) -> list[Path]:
    """Write an SVG file `cost_NAME.svg` into `folder` for each plot. Raises `ConfigError` on a file without plots."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        plots = [as_plot(plot) for plot in record["plots"]]
        drawn = {f"cost_{plot.name}.svg": as_svg(plot, where_from(record)) for plot in plots}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a record of plots: {type(error).__name__}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in drawn.items():
        (folder / name).write_text(svg, encoding="utf-8")
    return [folder / name for name in drawn]


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def main(file: Path, folder: Path) -> None:
    """Draw the plots of FILE into FOLDER."""
    for written in write_plots(file, folder):
        click.echo(written)


if __name__ == "__main__":
    main()
