"""Settings that do not come from the command line: a config file, and `PIECEGRAPH_*` variables.

The command line takes precedence over the environment, the environment over the file, the file over defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from piecegraph import environment
from piecegraph.errors import ConfigError, did_you_mean, shorten
from piecegraph.tools.command_line.options import COMPILE_FLAGS, LLM_FLAGS, SAMPLING_FLAGS


def known_variables() -> list[str]:
    """Return every `PIECEGRAPH_*` variable that is read anywhere."""
    of_the_cache = (environment.CACHE, environment.CACHE_DIR, environment.CACHE_MAX_SIZE, environment.SIGNING_KEY_FILE)
    of_others = (environment.API_KEY, environment.SYMMETRIC_SUMS, environment.CPU_KERNELS)
    return [*of_the_cache, *of_others, *(flag.variable for flag in (*LLM_FLAGS, *COMPILE_FLAGS, *SAMPLING_FLAGS))]


def check_environment() -> None:
    """Refuse a `PIECEGRAPH_*` variable that nothing reads: a misspelt name would have no effect."""
    known = known_variables()
    if environment.piecegraph_variables().get(environment.CACHE_DIR) == "":
        raise ConfigError(f"{environment.CACHE_DIR} is empty; set it to a folder, or unset it.")
    for name in environment.piecegraph_variables():
        if name not in known:
            if name == environment.PREFIX:
                raise ConfigError(f"the environment has {name}, a prefix without the name of a setting; unset it.")
            raise ConfigError(f"the environment has {name}, which nothing reads.{did_you_mean(name, known)}")


def config_option(command: Any) -> Any:
    """Add `--config FILE`: values for arguments and options that are not given otherwise."""
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
            _check_kind(param, value)
            param.type_cast_value(ctx, value)
        except click.BadParameter as error:
            raise ConfigError(f"{file} sets {key} to {shorten(repr(value))}: {error.message}") from error
        except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"{file} sets {key} to a value of type {type(value).__name__}: it must be "
                f"{_KINDS.get(param.type.name, param.type.name)}."
            ) from error
        values[name] = value
    ctx.default_map = values


_KINDS = {
    "boolean": "true or false",
    "float": "a number",
    "float range": "a number",
    "integer": "a whole number",
    "integer range": "a whole number",
    "text": "text",
}
"""The kinds of values in plain words, by the names of click's types."""


def _check_kind(param: click.Parameter, value: object) -> None:
    """Raise `TypeError` for a value of a file that has another type but that click would convert."""
    kind = param.type.name
    is_number = kind.startswith(("integer", "float"))
    is_wrong = (
        (kind == "text" and not param.multiple and isinstance(value, list | dict))
        or (is_number and isinstance(value, bool))
        or (kind.startswith("integer") and isinstance(value, float))
    )
    if is_wrong:
        raise TypeError(f"{value!r} is not {_KINDS[kind]}")


def read_config(file: Path) -> dict[str, Any]:
    """Return the mapping in a `.toml`, `.yaml` or `.yml` file. Raises `ConfigError` on anything else."""
    if not file.is_file():
        raise ConfigError(f"{file} is not a regular file.")
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
    except RecursionError as error:
        raise ConfigError(f"{file} cannot be read: its values are nested too deeply.") from error
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
