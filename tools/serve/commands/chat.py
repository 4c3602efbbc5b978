"""The command `piecegraph chat`: a conversation in the terminal, with a server or in this process."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from piecegraph import environment
from piecegraph.errors import ConfigError, PiecegraphError, RequestError
from piecegraph.progress import Phase
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
    from piecegraph.runner.common.sampling_params import SamplingParams
    from piecegraph.runner.llm import LLM

EPILOG = """\b
Examples:
  piecegraph chat
  piecegraph chat HuggingFaceTB/SmolLM2-360M-Instruct --temperature 0.7
  piecegraph chat --url http://127.0.0.1:8000 --system "Answer briefly."

In the conversation, /new forgets what was said, /undo takes the last question and its answer back, and /exit or
Ctrl-D ends it. A server's key is read from PIECEGRAPH_API_KEY."""

DEFAULTS: dict[str, Any] = {"max_tokens": 512, "temperature": 0.0}
"""The defaults of `chat` that differ from those of `SamplingParams`."""

LLM_DEFAULTS: dict[str, Any] = {
    "runner": "generate",
    "max_num_seqs": 1,
    "cudagraph_capture_sizes": (1,),
    "start": "fast",
}
"""The defaults of `chat` for `LLM`: one answer at a time, and the first of them before everything is compiled."""

NOT_FOR_SERVERS = ("n", "detokenize", "prompt_logprobs", "logprobs")
"""Sampling options that a conversation has no use for."""

TIMEOUT_S = 300.0
"""Seconds without any byte from the server after which an answer is given up."""

Messages = Sequence[dict[str, str]]

Answer = Callable[[Messages], Iterator[str]]
"""Yields the parts of the answer to a conversation."""


@click.command(cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("model", required=False)
@click.option("--url", help="Address of an OpenAI-compatible server; without it the model runs in this process.")
@click.option("--system", help="What the model is told before the conversation.")
@flags(SAMPLING_FLAGS, **DEFAULTS)
@flags(LLM_FLAGS, **LLM_DEFAULTS | {"cudagraph_capture_sizes": "1"})
@flags(COMPILE_FLAGS)
@click.option("--quiet", is_flag=True, help="Print no phases and no prompt for the next question.")
@click.option("--debug", is_flag=True, help="Show tracebacks and what the libraries say.")
@config_option
def command(model: str | None, url: str | None, system: str | None, quiet: bool, debug: bool, **values: Any) -> None:
    """Talk with a model.

    MODEL is a folder, a .gguf file or a hub id; without it the embedded SmolLM2-135M-Instruct. With --url it is the
    name of one of the server's models; without it the server's first. Questions are lines of standard input, answers
    go to standard output.
    """
    chosen = given(SAMPLING_FLAGS, values)
    unused = [name for name in NOT_FOR_SERVERS if name in chosen]
    if unused:
        raise ConfigError(f"{unused[0]} has no use in a conversation; leave it out, or use piecegraph run.")
    sampling = {**DEFAULTS, **chosen}
    given_to_llm = given(LLM_FLAGS, values)
    if url is not None:
        if given_to_llm:
            raise ConfigError(f"{next(iter(given_to_llm))} is of a model in this process, and --url names a server's.")
        talk(answers_of_server(url, model, sampling), system, quiet=quiet)
        return
    from piecegraph.runner.common.sampling_params import SamplingParams

    params = SamplingParams(**sampling)
    with PhaseDisplay(quiet=quiet) as display:
        display(Phase(name="import", detail="torch, transformers"))
        display.spin()
        from piecegraph.runner.llm import LLM
        from piecegraph.tools.command_line.quiet import quiet_once_imported

        on_phase = display if debug else quiet_once_imported(display)
        llm = LLM(model, on_phase=on_phase, **with_compile_flags({**LLM_DEFAULTS, **given_to_llm}, values))
        try:
            display.stop()
            talk(answers_of_model(llm, params), system, quiet=quiet)
        finally:
            llm.close()


def talk(answer: Answer, system: str | None, *, quiet: bool) -> None:
    """Answer the lines of standard input until it ends, each with all that was said before it.

    A question that is refused, or whose answer breaks off, is forgotten, and the conversation goes on.
    """
    first: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    said: list[dict[str, str]] = []
    while (question := _next_question(quiet=quiet)) is not None:
        if question == "/exit":
            return
        if question in ("/new", "/undo"):
            said = [] if question == "/new" else said[:-2]
            continue
        if question.startswith("/"):
            click.echo(f"there is no {question.split()[0]}; there are /new, /undo and /exit.", err=True)
            continue
        asked = {"role": "user", "content": question}
        parts: list[str] = []
        try:
            for part in answer([*first, *said, asked]):
                raise_if_interrupted()
                parts.append(part)
                sys.stdout.write(part)
                sys.stdout.flush()
        except RequestError as error:
            click.echo(f"{'' if not parts else chr(10)}error: {error}", err=True)
            continue
        sys.stdout.write("\n")
        sys.stdout.flush()
        said += [asked, {"role": "assistant", "content": "".join(parts)}]


def _next_question(*, quiet: bool) -> str | None:
    """Return the next line that is not empty, or None at the end."""
    while True:
        if not quiet and sys.stdin.isatty():
            click.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return None
        if line.strip():
            return line.strip()


def answers_of_model(llm: LLM, params: SamplingParams) -> Answer:
    """Return a function that answers with a model of this process.

    What was said before is computed once: it is found in the prefix cache. Raises `RequestError` for a model without a
    chat template.
    """
    from piecegraph.runner.prompts.chat import tokenize_chat

    if llm.tokenizer is None or not llm.tokenizer.chat_template:
        raise RequestError("the model's tokenizer has no chat template; use piecegraph run.")

    def answer(messages: Messages) -> Iterator[str]:
        prompt: Any = {"prompt_token_ids": tokenize_chat(list(messages), llm.tokenizer).token_ids}
        num_given = 0
        for output in llm.stream(prompt, params):
            text = output.outputs[0].text
            yield text[num_given:]
            num_given = len(text)

    return answer


def answers_of_server(url: str, model: str | None, sampling: dict[str, Any]) -> Answer:
    """Return a function that answers with an OpenAI-compatible server. It raises `RequestError` with its reason."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url={url!r}; it must be an address such as http://127.0.0.1:8000.")
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Content-Type": "application/json"}
    if (key := environment.read(environment.API_KEY)) is not None:
        headers["Authorization"] = f"Bearer {key}"

    def ask(path: str, body: dict[str, Any] | None = None) -> Iterator[bytes]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{base}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                yield from response
        except urllib.error.HTTPError as error:
            raise RequestError(_reason(error)) from error
        except (OSError, urllib.error.URLError) as error:
            reason = getattr(error, "reason", error)
            raise ServerUnreachable(f"{base} cannot be reached: {reason}. Start one with piecegraph serve.") from error

    name = model or str(json.loads(b"".join(ask("/v1/models")))["data"][0]["id"])

    def answer(messages: Messages) -> Iterator[str]:
        body = {**sampling, "model": name, "messages": list(messages), "stream": True}
        for line in ask("/v1/chat/completions", body):
            text = line.decode().strip().removeprefix("data: ")
            if not text or text == "[DONE]":
                continue
            event = json.loads(text)
            if "error" in event:
                raise RequestError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""

    return answer


class ServerUnreachable(PiecegraphError):
    """Raised when the server of a conversation does not answer."""


def _reason(error: urllib.error.HTTPError) -> str:
    """Return what a server says about a request that it refuses."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers with status {error.code}."
