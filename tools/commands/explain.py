"""The command `piecegraph explain`: how a model would be split, captured and dispatched, and why a path is slower."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from piecegraph.compiler.common.private_folder import scratch_folder
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.errors import ConfigError
from piecegraph.runner.common.speculative_config import HEADS
from piecegraph.tools.command_line.compile_flags import engine_config, with_compile_flags
from piecegraph.tools.command_line.options import COMPILE_FLAGS, CONTEXT, LLM_FLAGS, Command, flags, given
from piecegraph.tools.command_line.passes_text import layer_lines, layer_record, linear_line, pass_lines, pass_record
from piecegraph.tools.command_line.phases import PhaseDisplay
from piecegraph.tools.command_line.quiet import importing
from piecegraph.tools.command_line.settings import config_option

if TYPE_CHECKING:
    from piecegraph.runner.cudagraphs.dispatch_table import DispatchRange
    from piecegraph.runner.cudagraphs.dispatcher import Dispatched
    from piecegraph.runner.cudagraphs.measured_dispatcher import CostChoice
    from piecegraph.runner.inspect.explanation import AttentionRow, Explanation
    from piecegraph.runner.pipeline_parallel.summary import StageSummary
    from piecegraph.runner.tensor_parallel.summary import RanksSummary

EPILOG = """\b
Examples:
  piecegraph explain HuggingFaceTB/SmolLM2-360M-Instruct
  piecegraph explain shape:llama-8b --assume-gpu --max-num-seqs 64
  piecegraph explain ./my-model --cudagraph-mode FULL --json
  piecegraph explain ./my-model --html report.html"""

INDENT = " " * 12


@click.command(cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("model")
@flags(LLM_FLAGS)
@flags(COMPILE_FLAGS)
@click.option("--assume-gpu", is_flag=True, help="Explain for an NVIDIA GPU, whether or not one is here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Write one page of HTML there, too, with charts."
)
@click.option("--quiet", is_flag=True, help="Print no phases.")
@click.option("--debug", is_flag=True, help="Show tracebacks and what the libraries say.")
@config_option
def command(
    model: str, assume_gpu: bool, as_json: bool, html: Path | None, quiet: bool, debug: bool, **values: Any
) -> None:
    """Show pieces, dispatch table, and why anything is slower than asked for.

    MODEL is a folder, a .gguf file, a hub id, or shape:NAME (qwen3-0.6b, llama-8b). Its config is read, its weights
    are not: nothing is compiled or captured, and a laptop explains any size; --assume-gpu shows what a GPU would run.
    Flags mean what they mean to `piecegraph run`.
    """
    if html is not None and not html.absolute().parent.is_dir():
        raise click.UsageError(f"--html {html}: {html.absolute().parent} is not a directory. Make it first.")
    with PhaseDisplay(quiet=quiet) as display, scratch_folder() as scratch:
        with importing(display, debug=debug):
            from piecegraph.runner.inspect.explanation import explain
            from piecegraph.tools.cache.entries.eager_pieces import eager_pieces
            from piecegraph.tools.command_line.shapes import model_folder
        arguments = with_compile_flags(given(LLM_FLAGS, values), values, assume_gpu=assume_gpu)
        config = engine_config(model_folder(model, scratch), arguments)
        explanation = explain(config, assume_gpu=assume_gpu, on_phase=display)
        eager = {} if assume_gpu else eager_pieces(config)
        display.stop()
    record = {**as_record(model, explanation), "eager_pieces": dict(eager)} if as_json or html is not None else {}
    if html is not None:
        write_page(html, record, explanation, display.seconds)
    if as_json:
        click.echo(json.dumps(record))
    else:
        click.echo("\n".join(as_lines(explanation, eager)))


def write_page(file: Path, record: Mapping[str, Any], explained: Explanation, seconds: Mapping[str, float]) -> None:
    """Write the page of `--html`. Raises `ConfigError` if the file cannot be written."""
    from piecegraph import __version__
    from piecegraph.tools.report.page import as_page

    ranks = explained.ranks
    weight_bytes = explained.num_parameters * explained.dtype.itemsize if ranks is None else ranks.weight_bytes
    page = as_page(record, seconds=seconds, weight_bytes=weight_bytes, version=__version__)
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {file}: cannot be written ({error.strerror}). Name another file.") from error


def as_lines(explained: Explanation, eager_pieces: Mapping[str, str] | None = None) -> Iterator[str]:
    """Return the explanation as text, with a word in front of each paragraph.

    `eager_pieces` are the reasons of the pieces known to run eagerly, by index.
    """
    where = f"{explained.device}, assumed" if explained.is_assumed else str(explained.device)
    dtype = str(explained.dtype).removeprefix("torch.")
    report = explained.report
    yield _titled(
        "model", f"{explained.model_class}, {explained.num_parameters / 1e6:.1f}M parameters, {dtype} on {where}"
    )
    if explained.num_engines > 1:
        yield _titled(
            "engines",
            f"{explained.num_engines}, each as below, with weights and a KV cache of its own; nothing is exchanged in "
            "a step",
        )
    if explained.ranks is not None:
        yield _titled("ranks", *_rank_lines(explained.ranks))
    if explained.stages:
        yield _titled("stages", *_stage_lines(explained.stages))
    yield _titled(
        "limits",
        f"{explained.max_model_len} tokens a text, {explained.max_num_seqs} requests at once, "
        f"{explained.max_num_batched_tokens} tokens a step",
    )
    yield _titled("attention", *map(_attention_line, explained.attention))
    yield _titled("", f"{explained.cache_bytes_per_token / 1024:.1f} KiB of key/value cache a token")
    yield _titled("", *(f"backend {reason}" for reason in explained.backend_reasons))
    yield _titled(
        "pieces",
        f"{report.num_pieces} -> {report.num_unique_pieces} unique, {report.num_split_ops} split ops",
        "unique  pieces  nodes",
        *(f"{row.index:>6}  {row.shared_by:>6}  {row.num_nodes:>5}" for row in report.unique_pieces),
    )
    yield _titled("passes", *pass_lines(report.passes))
    if explained.layer is not None:
        yield _titled("a layer", *layer_lines(explained.layer))
    if explained.linears:
        yield _titled("linears", *map(linear_line, explained.linears))
    sizes = ", ".join(map(str, explained.compile_sizes))
    yield _titled("compiler", explained.compiler + (f", and static pieces for {sizes} tokens" if sizes else ""))
    yield _titled(
        "split ops",
        *(
            f"{row.calls} x {row.op}: {row.cost}" + (f" ({row.note.removeprefix(f'{row.op}: ')})" if row.note else "")
            for row in explained.split_ops
        ),
    )
    yield _titled("replay", *_replay_lines(explained))
    yield _titled(
        "graphs",
        f"{explained.configured_mode.value}: decode {explained.decode_mode.value}, "
        f"other batches {explained.mixed_mode.value}",
        f"to capture: {explained.num_full} FULL, {explained.num_piecewise} PIECEWISE",
    )
    yield _titled("decode", "requests -> mode, padded to", *dispatch_lines(explained.decode))
    yield _titled("other", "tokens -> mode, padded to", *dispatch_lines(explained.mixed))
    if explained.by_cost:
        yield _titled(
            "by cost", "cheaper than the smallest graph that fits, in milliseconds", *cost_lines(explained.by_cost)
        )
    if explained.drafting:
        yield _titled("drafts", *_draft_lines(explained))
    if explained.notes:
        yield _titled("notes", *explained.notes)
    eager = [f"unique piece {index} runs eagerly: {reason}" for index, reason in (eager_pieces or {}).items()]
    yield _titled("slower", *((*eager, *explained.slower_paths) or ("nothing: every batch runs as asked for",)))


def _draft_lines(explained: Explanation) -> Iterator[str]:
    """Yield how tokens are drafted, under which graphs they are verified, and the model that drafts them, if any."""
    yield explained.drafting
    yield "requests that verify all drafts -> mode, padded to"
    yield from dispatch_lines(explained.verification)
    draft = explained.draft
    if draft is None:
        return
    report, cost = draft.report, f"{draft.cache_bytes_per_token / 1024:.1f} KiB of key/value cache a token more"
    what = "head" if explained.drafting.startswith(HEADS) else "draft model"
    yield f"{what} {draft.model_class}, {draft.num_parameters / 1e6:.1f}M parameters, {cost}"
    yield from map(_attention_line, draft.attention)
    yield from (f"backend {reason}" for reason in draft.backend_reasons)
    yield f"pieces {report.num_pieces} -> {report.num_unique_pieces} unique, {report.num_split_ops} split ops"
    yield from pass_lines(report.passes)
    graphs = f"{draft.num_full} FULL, one for each number of requests" if draft.num_full else "none"
    yield f"graphs of its passes to capture: {graphs}; prompts are read without graphs"
    yield from draft.notes


def dispatch_lines(ranges: Sequence[DispatchRange]) -> list[str]:
    """Return a line for each range of batches; consecutive ranges that grow by one step share a line."""
    lines: list[str] = []
    for group in _in_steps(ranges):
        first, last = group[0], group[-1]
        sizes = f"{first.first}" if first.first == last.last else f"{first.first}-{last.last}"
        line = f"{sizes:>11} -> {last.mode.value}"
        if len(group) > 1:
            assert first.num_tokens is not None and last.num_tokens is not None and group[1].num_tokens is not None
            line += f" {first.num_tokens}, {group[1].num_tokens}, ... {last.num_tokens}"
        elif last.num_tokens is not None:
            line += f" {last.num_tokens}"
        lines.append(line + (f"  ({first.reason})" if first.reason else ""))
    return lines


def cost_lines(choices: Sequence[CostChoice]) -> list[str]:
    """Return a line for each range of batches that do not run under the smallest graph that fits, with both times."""
    return [
        f"{_batches_of(choice):>11} -> {_run_as(choice.taken)} {choice.seconds * 1e3:.3g}, "
        f"not {_run_as(choice.instead_of)} {choice.instead_of_seconds * 1e3:.3g}"
        for choice in choices
    ]


def _batches_of(choice: CostChoice) -> str:
    count = choice.uniform_token_count
    kind = "others of" if count is None else "decodes of" if count == 1 else f"batches of {count} each,"
    return (
        f"{kind} {choice.first}-{choice.last} tokens" if choice.first < choice.last else f"{kind} {choice.first} tokens"
    )


def _run_as(dispatched: Dispatched) -> str:
    is_padded = dispatched.mode is not CUDAGraphMode.NONE
    return f"{dispatched.mode.value} {dispatched.descriptor.num_tokens}" if is_padded else dispatched.mode.value


def cost_record(choice: CostChoice) -> dict[str, Any]:
    """Return what `--json` prints of a choice by cost. The padded size of a mode without graphs is None."""

    def run_as(dispatched: Dispatched, seconds: float) -> dict[str, Any]:
        is_padded = dispatched.mode is not CUDAGraphMode.NONE
        num_tokens = dispatched.descriptor.num_tokens if is_padded else None
        return {"mode": dispatched.mode.value, "num_tokens": num_tokens, "seconds": seconds}

    return {
        "uniform_token_count": choice.uniform_token_count,
        "first": choice.first,
        "last": choice.last,
        "taken": run_as(choice.taken, choice.seconds),
        "instead_of": run_as(choice.instead_of, choice.instead_of_seconds),
    }


def _in_steps(ranges: Sequence[DispatchRange]) -> list[list[DispatchRange]]:
    """Return `ranges` in groups that the same mode and reason, and padding in equal steps, put together.

    A group has three or more consecutive ranges; every other range is on its own.
    """
    groups: list[list[DispatchRange]] = []
    for row in ranges:
        group = groups[-1] if groups else []
        if group and _continues(group, row):
            group.append(row)
        else:
            groups.append([row])
    return [part for group in groups for part in ([group] if len(group) > 2 else [[row] for row in group])]


def _continues(group: Sequence[DispatchRange], row: DispatchRange) -> bool:
    last = group[-1]
    if row.num_tokens is None or last.num_tokens is None or (row.mode, row.reason) != (last.mode, last.reason):
        return False
    step = row.num_tokens - last.num_tokens
    return len(group) == 1 or step == last.num_tokens - (group[-2].num_tokens or 0)


def _attention_line(row: AttentionRow) -> str:
    head = str(row.key_dim) if row.key_dim == row.value_dim else f"{row.key_dim} (keys), {row.value_dim} (values)"
    line = f"{row.layers} layers of {row.num_q_heads} query and {row.num_kv_heads} KV heads, head size {head}"
    line += f", window {row.window}" if row.window else ""
    line += f", chunks of {row.chunk_size}" if row.chunk_size else ""
    line += f", soft cap {row.softcap:g}" if row.softcap else ""
    return (
        line
        + (", sinks" if row.has_sinks else "")
        + (", latent" if row.is_latent else "")
        + (", ALiBi" if row.has_slopes else "")
    )


def _rank_lines(ranks: RanksSummary) -> Iterator[str]:
    """Yield what each rank holds and the collectives of a step; the rest of the page is about one rank."""
    whole = f", of which {ranks.whole_bytes / 2**20:.1f} MiB are on every rank"
    yield f"{ranks.num_ranks} ranks, each with {ranks.weight_bytes / 2**20:.1f} MiB of weights{whole}"
    if ranks.q_heads is None:
        yield "heads are not divided: each rank computes all of them"
    else:
        padding = f"; {ranks.padded_q_heads} query heads are padding" if ranks.padded_q_heads else ""
        copies = f"; a KV head is held up to {ranks.kv_copies} times" if ranks.kv_copies > 1 else ""
        yield f"{ranks.q_heads} query and {ranks.kv_heads} KV heads on a rank{padding}{copies}"
    if ranks.experts is not None:
        yield f"{ranks.experts} experts of each layer on a rank, whole"
    for row in ranks.collectives:
        unit = "request" if row.is_of_logits else "token"
        yield f"{row.calls} x {row.op} a step, {row.bytes_per_row} bytes a {unit}"


def _stage_lines(stages: Sequence[StageSummary]) -> Iterator[str]:
    """Yield what each rank of each stage holds and sends; the rest of the page is about all stages together."""
    for index, stage in enumerate(stages):
        layers = f"layers {stage.first_layer} to {stage.end_layer - 1}, {stage.weight_bytes / 2**20:.1f} MiB of weights"
        what = "tokens to all others" if index == len(stages) - 1 else "hidden states to the next"
        yield f"stage {index}: {layers} on a rank; sends {what}, {stage.sent_bytes_per_token} bytes a token"
    yield (
        f"one request keeps one stage busy at a time, {len(stages)} or more all of them; batches that were missing are "
        "counted (piecegraph:pipeline_bubbles)"
    )


def _replay_lines(explained: Explanation) -> list[str]:
    lines = ["FULL: 1 x graph, the whole step"] if explained.num_full else []
    if explained.num_piecewise:
        lines.append("PIECEWISE: " + ", ".join(f"{count} x {cost}" for cost, count in explained.replay_costs.items()))
    calls = explained.report.num_pieces + explained.report.num_split_ops
    return lines or [f"nothing is captured: {calls} calls, one by one"]


def _titled(title: str, *lines: str) -> str:
    return "\n".join(f"{title if number == 0 else '':<{len(INDENT)}}{line}" for number, line in enumerate(lines))


def as_record(model: str, explained: Explanation) -> dict[str, Any]:
    """Return what `--json` prints: the same facts by name, with every range on its own."""
    from piecegraph.tools.command_line.records import as_plain

    def ranges(rows: Sequence[DispatchRange]) -> list[dict[str, Any]]:
        return [{**as_plain(row), "mode": row.mode.value} for row in rows]

    report = explained.report
    return {
        "model": model,
        **as_plain(explained),
        "dtype": str(explained.dtype).removeprefix("torch."),
        "report": {  # without keys and seconds, which are those of meta tensors and eager pieces
            "num_pieces": report.num_pieces,
            "num_unique_pieces": report.num_unique_pieces,
            "num_split_ops": report.num_split_ops,
            "pieces": as_plain(report.pieces),
            "unique_pieces": [
                {"index": row.index, "shared_by": row.shared_by, "num_nodes": row.num_nodes}
                for row in report.unique_pieces
            ],
            "passes": [pass_record(row) for row in report.passes],
        },
        "layer": None if explained.layer is None else layer_record(explained.layer),
        "configured_mode": explained.configured_mode.value,
        "decode_mode": explained.decode_mode.value,
        "mixed_mode": explained.mixed_mode.value,
        "decode": ranges(explained.decode),
        "mixed": ranges(explained.mixed),
        "by_cost": [cost_record(choice) for choice in explained.by_cost],
        "verification": ranges(explained.verification),
        "draft": None if explained.draft is None else as_record(explained.draft.source, explained.draft),
        "replay_costs": explained.replay_costs,
    }
