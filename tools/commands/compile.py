"""The command `piecegraph compile`: fill the cache with a model, on a machine that need not have its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from piecegraph.cache.store.store import Store
from piecegraph.cache.trust.key_files import read_signing_key
from piecegraph.cache.trust.key_pair import PublicKey
from piecegraph.compiler.common.private_folder import scratch_folder
from piecegraph.errors import ConfigError
from piecegraph.runner.common.speculative_config import HEADS
from piecegraph.tools.cache.reading.filled import Filled, read_filled, table_lines, target_lines
from piecegraph.tools.cache.terminal.place import CacheDir, Place, place
from piecegraph.tools.command_line.compile_flags import engine_config, with_compile_flags
from piecegraph.tools.command_line.options import COMPILE_FLAGS, CONTEXT, LLM_FLAGS, Command, flags, given
from piecegraph.tools.command_line.phases import PhaseDisplay
from piecegraph.tools.command_line.quantities import bytes_text
from piecegraph.tools.command_line.quiet import importing
from piecegraph.tools.command_line.settings import config_option

if TYPE_CHECKING:
    from piecegraph.runner.startup.compile_ahead import CompiledAhead

EPILOG = """\b
Examples:
  piecegraph compile ./my-model --dtype float32
  piecegraph compile Qwen/Qwen3-0.6B --device cuda --compile-sizes 1,2,4,8
  piecegraph compile ./my-model --cache-dir /opt/piecegraph --signing-key image.key"""

INDENT = " " * 9


@click.command(cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("model")
@flags(LLM_FLAGS)
@flags(COMPILE_FLAGS)
@click.option("--cache-dir", type=CacheDir(path_type=Path), help="Folder of the cache, instead of the usual one.")
@click.option(
    "--signing-key",
    "signing_key_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Private or shared key to sign with: other users may then read the cache, and trust it by that key.",
)
@click.option("--force", is_flag=True, help="Compile anew what is there already.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", is_flag=True, help="Print no phases.")
@click.option("--debug", is_flag=True, help="Show tracebacks and what the libraries say.")
@config_option
def command(
    model: str,
    cache_dir: Path | None,
    signing_key_file: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **values: Any,
) -> None:
    """Fill the cache with a model, from its config alone.

    MODEL is a folder, a .gguf file, a hub id, or shape:NAME. No weights are read, and no memory is set aside for them.
    `LLM` and `piecegraph run` with the same model and flags then start from the cache, on a machine like this one.

    Code is made for the device that is here, and for the versions and settings the output names.
    """
    where = place(cache_dir, signing_key_file)
    store = open_to_fill(replace(where, publish=signing_key_file is not None))
    with PhaseDisplay(quiet=quiet) as display, scratch_folder() as scratch:
        with importing(display, debug=debug):
            from piecegraph.runner.startup.compile_ahead import check_can_compile_for, compile_ahead
            from piecegraph.tools.command_line.shapes import model_folder
        check_can_compile_for(values["device"])
        arguments = with_compile_flags(given(LLM_FLAGS, values), values)
        config = engine_config(model_folder(model, scratch), arguments)
        compiled = compile_ahead(config, store, anew=force, on_phase=display)
        display.stop()
    filled = read_filled(store, compiled.key)
    drafts = [] if compiled.draft is None else [(compiled.draft, read_filled(store, compiled.draft.key))]
    if as_json:
        record = as_record(model, where, signing_key_file, compiled, filled)
        draft = next((model_record(one, of_draft) for one, of_draft in drafts), None)
        click.echo(json.dumps({**record, "draft": draft}))
    else:
        what = "head" if config.speculative is not None and config.speculative.method in HEADS else "draft model"
        lines = [line for one, of_draft in drafts for line in draft_lines(what, one, of_draft)]
        click.echo("\n".join([*as_lines(where, signing_key_file, compiled, filled), *lines]))


def open_to_fill(place: Place) -> Store:
    """Open the cache to be filled.

    Raises `ConfigError` for a key that cannot sign what is to be published, `CacheError` with what to do.
    """
    if place.publish and place.signing_key_file is not None:
        key = read_signing_key(place.signing_key_file)
        if isinstance(key, PublicKey):
            raise ConfigError(
                f"--signing-key {place.signing_key_file} is a public key, which verifies and cannot sign. Name the "
                "private key that belongs to it; `piecegraph cache keygen FILE` makes a pair."
            )
    return place.open_to_change()


def as_lines(where: Place, signing_key_file: Path | None, compiled: CompiledAhead, filled: Filled) -> Iterator[str]:
    """Return the model and the table, with a word in front of each paragraph."""
    report = compiled.report
    yield f"{filled.title}: {_state(compiled)}, {report.num_pieces} pieces, {report.num_unique_pieces} unique"
    yield from table_lines(filled.rows)
    yield from _titled("all", f"{bytes_text(filled.bytes)} in {where.root} (set by {where.set_by})")
    yield from _titled("for", *target_lines(filled.factors))
    if signing_key_file is not None:
        yield from _titled("signed", f"with {signing_key_file}; readable by other users")
    yield from _titled("notes", *notes_of(compiled))


def draft_lines(what: str, compiled: CompiledAhead, filled: Filled) -> Iterator[str]:
    """Return the draft model or the head, which `what` says, and its table."""
    counts = f"{compiled.report.num_pieces} pieces, {compiled.report.num_unique_pieces} unique"
    yield f"{what}, {filled.title}: {_state(compiled)}, {counts}"
    yield from table_lines(filled.rows)
    yield from _titled("all", bytes_text(filled.bytes))
    yield from _titled("notes", *notes_of(compiled))


def notes_of(compiled: CompiledAhead) -> tuple[str, ...]:
    """Return what differs from what was asked for, and why."""
    report = compiled.report
    unused = [
        f"size {row.size}: piece_{row.unique} runs the dynamic piece: {row.note}"
        for row in report.static_pieces
        if not row.is_used
    ]
    loaded = report.cache.loaded_pieces
    shared = [f"pieces that were there already: {loaded}"] if loaded and not compiled.was_cached else []
    return (*compiled.notes, *shared, *unused)


def as_record(
    model: str, where: Place, signing_key_file: Path | None, compiled: CompiledAhead, filled: Filled
) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "model": model,
        **model_record(compiled, filled),
        "cache_dir": str(where.root),
        "set_by": where.set_by,
        "signing_key": None if signing_key_file is None else str(signing_key_file),
        **{name: filled.factors[name] for name in ("machine", "build", "settings")},
    }


def model_record(compiled: CompiledAhead, filled: Filled) -> dict[str, Any]:
    """Return what `--json` says of one model."""
    from piecegraph.tools.command_line.records import as_plain

    return {
        "title": filled.title,
        "state": _state(compiled),
        "key": compiled.key,
        "num_pieces": compiled.report.num_pieces,
        "num_unique_pieces": compiled.report.num_unique_pieces,
        "entries": as_plain(filled.rows),
        "bytes": filled.bytes,
        "notes": list(notes_of(compiled)),
    }


def _state(compiled: CompiledAhead) -> str:
    return "already compiled" if compiled.was_cached else "compiled"


def _titled(title: str, *lines: str) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f"{title if number == 0 else '':<{len(INDENT)}}{line}"
