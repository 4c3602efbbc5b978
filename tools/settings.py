"""Settings that do not come from the command line: a config file, and `PIECEGRAPH_*` variables.

The command line wins over the environment, the environment over the file, the file over defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from piecegraph import environment
from piecegraph.errors import ConfigError, did_you_mean
from piecegraph.tools.options import COMPILE_FLAGS, LLM_FLAGS, SAMPLING_FLAGS


def known_variables() -> list[str]:
    """Every `PIECEGRAPH_*` variable that something reads."""
    of_the_cache = (environment.CACHE, environment.CACHE_DIR, environment.CACHE_MAX_SIZE, environment.SIGNING_KEY_FILE)
    return [*of_the_cache, *(flag.variable for flag in (*LLM_FLAGS, *COMPILE_FLAGS, *SAMPLING_FLAGS))]


def check_environment() -> None:
    """Refuse a `PIECEGRAPH_*` variable that nothing reads: a misspelt setting is not a setting."""
    known = known_variables()
    for name in environment.ours():
        if name not in known:
            raise ConfigError(f"the environment has {name}, which nothing reads.{did_you_mean(name, known)}")


def config_option(command: Any) -> Any:
    """`--config FILE`: values for arguments and options that are not given otherwise."""
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_use_config,
        help="TOML or YAML file with the options of this command, by name (max_tokens: 64).",
    )(command)


def _use_config(ctx: click.Context, parameter: click.Parameter, file: Path | None) -> None:
    if file is None or ctx.resilient_parsing:
        return
    takes = {param.name: param for param in ctx.command.params if param.name and param.name != "config"}
    values: dict[str, Any] = {}
    for key, value in read_config(file).items():
        name = str(key).replace("-", "_")
        param = takes.get(name)
        if param is None:
            raise ConfigError(
                f"{file} sets {key!r}, which {ctx.command_path} does not take.{did_you_mean(name, takes)}"
            )
        try:
            param.type_cast_value(ctx, value)
        except click.BadParameter as error:
            raise ConfigError(f"{file} sets {key} to {value!r}: {error.message}") from error
        values[name] = value
    ctx.default_map = values


def read_config(file: Path) -> dict[str, Any]:
    """The mapping in a `.toml`, `.yaml` or `.yml` file. Raises `ConfigError` on anything else."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".toml":
            import tomllib

            value: object = tomllib.loads(text)
        elif file.suffix in (".yaml", ".yml"):
            import yaml

            value = yaml.safe_load(text)
        else:
            raise ConfigError(f"{file} is neither .toml, .yaml nor .yml.")
    except ConfigError:
        raise
    except (ValueError, OSError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except Exception as error:
        if type(error).__module__.startswith("yaml"):
            raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
        raise
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds a {type(value).__name__}; a mapping of option names to values is needed.")
    return value
