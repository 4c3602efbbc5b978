"""The command `piecegraph bench perplexity`: how well a model predicts a text, by the dtype of its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from piecegraph.errors import RequestError
from piecegraph.tools.bench.session import about, bench_arguments, bench_start, output_flags
from piecegraph.tools.command_line.compile_flags import with_compile_flags
from piecegraph.tools.command_line.options import COMPILE_FLAGS, CONTEXT, LLM_FLAGS, Command, flags

if TYPE_CHECKING:
    from piecegraph.runner.llm import LLM

EPILOG = """\b
Examples:
  piecegraph bench perplexity text.txt
  piecegraph bench perplexity text.txt ./my-model --quantization int8 --json"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """How well a model predicts the tokens of a text, each from those before it in the same part."""

    num_tokens: int  # that are predicted: all but the first of each part
    mean_nats: float  # of a token: minus its log probability

    @property
    def value(self) -> float:
        return math.exp(self.mean_nats)


def perplexity(llm: LLM, text: str, window: int) -> Perplexity:
    """Return the perplexity of `text`, in parts of `window` tokens that are predicted apart from each other.

    Raises `RequestError` for a text of fewer than two tokens.
    """
    from piecegraph.runner.common.sampling_params import SamplingParams

    assert llm.tokenizer is not None, "a text needs a tokenizer"
    tokens: list[int] = llm.tokenizer(text)["input_ids"]
    parts = [part for part in split(tokens, window) if len(part) > 1]
    if not parts:
        raise RequestError(f"the text has {len(tokens)} tokens; the second one is the first that can be predicted.")
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for output in llm.generate([{"prompt_token_ids": part} for part in parts], params, use_tqdm=False):
        rows = output.prompt_logprobs
        assert rows is not None and len(rows) == len(output.prompt_token_ids)
        for token, row in zip(output.prompt_token_ids[1:], list(rows)[1:], strict=True):
            assert row is not None
            found.append(-row[token].logprob)
    return Perplexity(num_tokens=len(found), mean_nats=math.fsum(found) / len(found))


def split(tokens: Sequence[int], size: int) -> list[list[int]]:
    """Return `tokens` in parts of `size`; the last one may be shorter."""
    return [list(tokens[start : start + size]) for start in range(0, len(tokens), size)]


@click.command("perplexity", cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("model", required=False)
@click.option(
    "--window", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens that are predicted together."
)
@flags(LLM_FLAGS)
@flags(COMPILE_FLAGS)
@output_flags
def command(text: Path, model: str | None, window: int, as_json: bool, quiet: bool, debug: bool, **values: Any) -> None:
    """Measure how well MODEL predicts the file TEXT; without MODEL, how well the embedded one does.

    Lower is better; figures compare only for the same text and tokenizer.
    """
    try:
        words = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{text} is not valid UTF-8 ({error.reason}). Convert it, for instance with iconv."
        ) from error
    arguments = bench_arguments(model or "", values)
    arguments.setdefault("max_model_len", window + 1)
    with bench_start(model or "", quiet=quiet, debug=debug) as begun:
        from piecegraph.runner.llm import LLM

        with LLM(begun.folder or None, on_phase=begun.on_phase, **with_compile_flags(arguments, values)) as llm:
            found = perplexity(llm, words, window)
            begun.display.stop()
            record = {
                "model": model,
                "dtype": str(llm.model_config.dtype).removeprefix("torch."),
                "quantization": arguments.get("quantization"),
                "num_tokens": found.num_tokens,
                "perplexity": found.value,
                **about(llm, begun.display),
            }
    if as_json:
        click.echo(json.dumps(record))
    else:
        notes = [note for note in record["notes"] if note.startswith("quantization")]
        lines = [f"perplexity {found.value:.4f} over {found.num_tokens} tokens ({record['dtype']})", *notes]
        click.echo("\n".join(lines))
