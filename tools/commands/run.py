"""The command `piecegraph run`: one prompt, answered as text that streams to stdout."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from piecegraph.errors import RequestError
from piecegraph.progress import Phase
from piecegraph.runner.lora.peft_config import read_config
from piecegraph.runner.lora.request import LoRARequest
from piecegraph.runner.prompts.request_options import check_unicode
from piecegraph.tools.command_line.compile_flags import with_compile_flags
from piecegraph.tools.command_line.interrupts import raise_if_interrupted
from piecegraph.tools.command_line.options import (
    COMPILE_FLAGS,
    CONTEXT,
    LLM_FLAGS,
    SAMPLING_FLAGS,
    Command,
    flags,
    given,
)
from piecegraph.tools.command_line.phases import PhaseDisplay
from piecegraph.tools.command_line.settings import config_option

if TYPE_CHECKING:
    from piecegraph.runner.common.outputs import RequestOutput
    from piecegraph.runner.common.sampling_params import SamplingParams
    from piecegraph.runner.llm import LLM
    from piecegraph.runner.prompts.tokenize import Prompt

DEFAULTS: dict[str, Any] = {"max_tokens": 256, "temperature": 0.0}
"""The defaults of `run` that differ from those of `SamplingParams`: longer answers, and greedy decoding."""

LLM_DEFAULTS: dict[str, Any] = {"runner": "generate", "max_num_seqs": 1, "cudagraph_capture_sizes": (1,)}
"""The defaults of `run` for `LLM`: nothing is compiled or captured for batches that one prompt cannot need."""

EPILOG = """\b
Examples:
  piecegraph run "What is the capital of France?"
  piecegraph run HuggingFaceTB/SmolLM2-360M-Instruct "Tell me a joke" --temperature 0.7
  cat question.txt | piecegraph run ./my-model - --max-tokens 64 --json

Every flag that takes a value is also a PIECEGRAPH_ variable: PIECEGRAPH_MAX_TOKENS=64."""


def looks_like_model(argument: str) -> bool:
    """Return whether a lone argument is MODEL rather than PROMPT.

    It is MODEL if such a file or folder exists, if it ends in `.gguf`, or if it has a slash and no white space, as hub
    ids and paths do.
    """
    if not argument or argument == "-":
        return False
    if argument.endswith(".gguf"):
        return True
    if any(character.isspace() for character in argument):
        return False
    return "/" in argument or Path(argument).exists()


def split_arguments(first: str | None, second: str | None) -> tuple[str | None, str | None]:
    """Return (MODEL, PROMPT) from the two optional arguments: a lone one is PROMPT unless it looks like a model."""
    if first is not None and second is None and not looks_like_model(first):
        return None, first
    return first, second


def read_prompt(prompt: str | None) -> str:
    """Return the prompt. It is read from standard input if it is "-", or if none is given and input is piped in.

    Raises `click.UsageError` if there is none, and `RequestError` if it is empty or not valid Unicode.
    """
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        piped = read_standard_input().rstrip("\n")
        prompt = piped or ("" if prompt == "-" else None)
    if prompt is None:
        raise click.UsageError('no prompt. Give one: piecegraph run "What is the capital of France?"')
    if not prompt:
        raise RequestError("the prompt is empty; a model needs at least one token to go on from.")
    check_unicode(prompt)
    return prompt


def read_standard_input() -> str:
    """Return all of standard input. Raises `RequestError` where it is not valid UTF-8."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not valid UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start} "
            f"({error.reason}). Convert it, for instance with iconv."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished request and how long it took. Times count from when the request was submitted."""

    output: RequestOutput
    first_token_seconds: float  # until the first output
    num_first_tokens: int  # in the first output: several with `n`, or with drafts
    seconds: float  # until the last output

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.output.outputs)

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens after the first output, per second since it arrived; None if it has all tokens."""
        elapsed = self.seconds - self.first_token_seconds
        num_later = self.num_tokens - self.num_first_tokens
        return num_later / elapsed if num_later > 0 and elapsed > 0 else None


@click.command(cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("model", required=False)
@click.argument("prompt", required=False)
@flags(SAMPLING_FLAGS, **DEFAULTS)
@flags(LLM_FLAGS, max_num_seqs=1, cudagraph_capture_sizes="1")
@flags(COMPILE_FLAGS)
@click.option("--chat/--no-chat", default=None, help="Use the model's chat template. [default: if it has one]")
@click.option("--lora", metavar="FOLDER", help="Answer with a LoRA adapter that peft has written.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done instead of streaming text.")
@click.option("--quiet", is_flag=True, help="Print no phases and no summary.")
@click.option("--debug", is_flag=True, help="Show tracebacks and what the libraries say.")
@config_option
def command(
    model: str | None,
    prompt: str | None,
    chat: bool | None,
    lora: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
    **values: Any,
) -> None:
    """Stream the answer of MODEL to PROMPT.

    MODEL is a folder, a .gguf file or a hub id; without it the embedded SmolLM2-135M-Instruct answers.
    PROMPT is text; "-", or nothing with input piped in, reads it from standard input.

    A lone argument is MODEL if such a file or folder exists, if it ends in .gguf, or if it has a slash
    and no white space; otherwise it is PROMPT. After the text come, on stderr, the pieces, the seconds
    of each phase and the tokens per second.
    """
    model, prompt = split_arguments(model, prompt)
    text = read_prompt(prompt)
    from piecegraph.runner.common.sampling_params import SamplingParams  # without torch: a bad value is refused at once

    sampling = SamplingParams(**{**DEFAULTS, **given(SAMPLING_FLAGS, values)})
    defaults = LLM_DEFAULTS if sampling.n == 1 else {"runner": "generate", "max_num_seqs": sampling.n}
    arguments = {**defaults, **_lora_arguments(lora), **given(LLM_FLAGS, values)}
    if values["seed"] is not None:
        arguments["seed"] = values["seed"]  # --seed is also the seed of the random weights of --load-format dummy
    with PhaseDisplay(quiet=quiet) as display:
        display(Phase(name="import", detail="torch, transformers"))
        display.spin()
        from piecegraph.runner.llm import LLM
        from piecegraph.tools.command_line.quiet import quiet_once_imported

        on_phase = display if debug else quiet_once_imported(display)
        llm = LLM(model, on_phase=on_phase, **with_compile_flags(arguments, values))
        try:
            adapter = None if lora is None else LoRARequest(Path(lora).name or lora, 1, lora)
            answer = answer_prompt(
                llm, text, sampling, chat=chat, display=display, stream=not as_json, lora_request=adapter
            )
            if as_json:
                record = as_record(llm, model, text, answer, display.seconds)
                click.echo(json.dumps(record, ensure_ascii=False))
            if not quiet:
                click.echo(summary(llm, answer, display.seconds), err=True)
        finally:
            llm.close()


def _lora_arguments(folder: str | None) -> dict[str, Any]:
    """Return the arguments of `LLM` for the adapter in `folder`, if one is given, with room for its rank.

    Raises `CheckpointError` or `UnsupportedModel` for a config that cannot be applied, before anything is loaded.
    """
    if folder is None:
        return {}
    config = read_config(Path(folder).expanduser())
    return {"enable_lora": True, "max_lora_rank": max(config.rank, *config.rank_pattern.values(), 1)}


def answer_prompt(
    llm: LLM,
    text: str,
    sampling: SamplingParams,
    *,
    chat: bool | None,
    display: PhaseDisplay,
    stream: bool,
    lora_request: LoRARequest | None = None,
) -> Answer:
    """Run the request to its end; with `stream`, write its text to stdout as it comes.

    If there are several completions (`n`), the first is streamed, and the others follow it, each after an empty line.
    """
    prompt = as_prompt(llm, text, chat)
    started = time.perf_counter()
    first_seconds: float | None = None
    num_first = 0
    num_written = 0  # characters
    output: RequestOutput | None = None
    display(Phase(name="first_token"))
    options: dict[str, Any] = {} if lora_request is None else {"lora_request": lora_request}
    for output in llm.stream(prompt, sampling, **options):
        raise_if_interrupted()
        if first_seconds is None:
            first_seconds = time.perf_counter() - started
            num_first = sum(len(completion.token_ids) for completion in output.outputs)
            display(Phase(name="first_token", seconds=first_seconds))
            display.stop()
        if stream:
            whole = output.outputs[0].text
            sys.stdout.write(whole[num_written:])
            sys.stdout.flush()
            num_written = len(whole)
    assert output is not None and first_seconds is not None, "LLM.stream ended without any output"
    if stream:
        sys.stdout.write("\n")
        for other in output.outputs[1:]:
            sys.stdout.write(f"\n{other.text}\n")
        sys.stdout.flush()
    return Answer(
        output=output,
        first_token_seconds=first_seconds,
        num_first_tokens=num_first,
        seconds=time.perf_counter() - started,
    )


def as_prompt(llm: LLM, text: str, chat: bool | None) -> Prompt:
    """Return the prompt for `LLM.stream`: rendered with the chat template, unless `chat` is False or there is none.

    Raises `RequestError` if `chat` is True and there is no chat template.
    """
    from piecegraph.runner.prompts.chat import tokenize_chat

    has_template = llm.tokenizer is not None and bool(llm.tokenizer.chat_template)
    if chat and not has_template:
        raise RequestError("--chat was asked for, but the model's tokenizer has no chat template; leave it out.")
    if chat is False or not has_template:
        return text
    return {"prompt_token_ids": tokenize_chat([{"role": "user", "content": text}], llm.tokenizer).token_ids}


def as_record(llm: LLM, model: str | None, prompt: str, answer: Answer, phases: dict[str, float]) -> dict[str, Any]:
    """Return the object that `--json` prints. `phases`: seconds by phase."""
    from piecegraph.runner.models.embedded_model import MODEL_NAME
    from piecegraph.tools.command_line.records import as_plain

    completion = answer.output.outputs[0]
    return {
        "model": model or MODEL_NAME,
        "prompt": prompt,
        "prompt_tokens": len(answer.output.prompt_token_ids),
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "outputs": as_plain(answer.output.outputs),
        "prompt_logprobs": as_plain(answer.output.prompt_logprobs),
        "timings": {
            "phases": phases,
            "first_token_seconds": answer.first_token_seconds,
            "total_seconds": answer.seconds,
            "tokens_per_second": answer.tokens_per_second,
        },
        **({} if (speculation := llm.engine.stats.speculation) is None else {"speculation": as_plain(speculation)}),
        "report": as_plain(llm.report),
        "notes": [str(note) for note in llm.notes],
    }


def summary(llm: LLM, answer: Answer, phases: dict[str, float]) -> str:
    """Return the closing lines: pieces, seconds by phase, speed, drafts, and the model's notes."""
    report = llm.report
    speed = answer.tokens_per_second
    spent = ", ".join(f"{name.replace('_', ' ')} {seconds:.2f}" for name, seconds in phases.items())
    lines = [
        f"pieces: {report.num_pieces} -> {report.num_unique_pieces} unique",
        f"seconds: {spent}",
        f"answer: {answer.num_tokens} tokens, ended by {answer.output.outputs[0].finish_reason}"
        + (f", {speed:.1f} tokens/s" if speed is not None else "")
        + f", first token after {answer.first_token_seconds:.2f} s",
    ]
    speculation = llm.engine.stats.speculation
    if speculation is not None:
        lines.append(f"speculation: {speculation}")
    return "\n".join(["", *lines, *(f"note: {note}" for note in llm.notes)])
