"""The command `piecegraph serve`: a model behind the OpenAI API."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from piecegraph import environment
from piecegraph.errors import ConfigError
from piecegraph.progress import Phase
from piecegraph.runner.pooling.task import CONVERSIONS, RUNNERS
from piecegraph.tools.command_line.compile_flags import with_compile_flags
from piecegraph.tools.command_line.options import COMPILE_FLAGS, CONTEXT, LLM_FLAGS, Command, flags, given
from piecegraph.tools.command_line.phases import PhaseDisplay
from piecegraph.tools.command_line.settings import config_option

if TYPE_CHECKING:
    from piecegraph.tools.serve.endpoints.settings import ServeSettings

EPILOG = """\b
Examples:
  piecegraph serve
  piecegraph serve HuggingFaceTB/SmolLM2-360M-Instruct --port 8080
  piecegraph serve sentence-transformers/all-MiniLM-L6-v2        # embeddings
  PIECEGRAPH_API_KEY=... piecegraph serve ./my-model --host 0.0.0.0

\b
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "Hello!"}]}'

SIGTERM or Ctrl-C lets running requests end, and a second one ends at once. docs/serving.md has more."""

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


@click.command(cls=Command, epilog=EPILOG, context_settings=CONTEXT)
@click.argument("model", required=False)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: all of them.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port to listen on; 0: any that is free.")
@click.option(
    "--served-model-name", multiple=True, help="Name of the model in requests. May be repeated. [default: MODEL]"
)
@click.option(
    "--api-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with a key on each line; a request must have one of them. Also PIECEGRAPH_API_KEY.",
)
@click.option("--max-body-bytes", type=int, default=8 << 20, show_default=True, help="Largest body of a request.")
@click.option(
    "--max-concurrent-requests", type=int, default=2048, show_default=True, help="Most requests in progress at once."
)
@click.option(
    "--max-num-queued-reqs",
    type=int,
    default=1024,
    show_default=True,
    help="Most completions that wait besides the --max-num-seqs that run; more get status 429.",
)
@click.option(
    "--max-wait", type=float, default=300.0, show_default=True, help="Longest wait of a request, in seconds; 0: any."
)
@click.option(
    "--shutdown-timeout", type=float, help="Longest wait for running requests at the end. [default: no limit]"
)
@click.option("--trust-request-chat-template", is_flag=True, help="Accept chat templates from requests.")
@click.option("--chat-template", help="Jinja template, or a file with one, instead of the model's.")
@click.option(
    "--runner",
    type=click.Choice(RUNNERS),
    help="What the model is loaded for: to generate, or to pool texts (/v1/embeddings). [default: auto]",
)
@click.option("--convert", type=click.Choice(CONVERSIONS), help="The results of a model that pools. [default: auto]")
@click.option(
    "--lora-modules",
    multiple=True,
    metavar="NAME=FOLDER",
    help="Serve a LoRA adapter under a name of its own (needs --enable-lora). May be repeated.",
)
@click.option(
    "--allow-runtime-lora-updating",
    is_flag=True,
    help="Let requests load adapters from any folder that the server can read, and unload them.",
)
@click.option("--access-log", is_flag=True, help="Log every request on stderr.")
@click.option("--seed", type=int, help="Seed of requests without one, and of --load-format dummy.")
@flags(LLM_FLAGS, start="fast")
@flags(COMPILE_FLAGS)
@click.option("--quiet", is_flag=True, help="Print no phases.")
@click.option("--debug", is_flag=True, help="Show tracebacks and what the libraries say.")
@config_option
def command(model: str | None, quiet: bool, debug: bool, **values: Any) -> int:
    """Serve a model through the OpenAI API.

    MODEL is a folder, a .gguf file or a hub id; without it the embedded SmolLM2-135M-Instruct is served.
    """
    settings = serve_settings(model, values)
    arguments = {"start": "fast", **given(LLM_FLAGS, values)}
    for name in ("seed", "chat_template", "runner", "convert"):
        if values[name] is not None:
            arguments[name] = values[name]
    with PhaseDisplay(quiet=quiet) as display:
        display(Phase(name="import", detail="torch, transformers, fastapi"))
        display.spin()
        from piecegraph.tools.serve.http.server import listen, serve

        _log_to_stderr(debug=debug, access_log=settings.access_log)
        listening = listen(settings)  # before the model: an address in use is known at once
        try:
            from piecegraph.runner.llm import LLM
            from piecegraph.tools.command_line.quiet import quiet_once_imported

            on_phase = display if debug else quiet_once_imported(display)
            llm = LLM(model, on_phase=on_phase, **with_compile_flags(arguments, values))
            try:
                display.stop()
                for note in () if quiet else llm.notes:
                    click.echo(f"note: {note}", err=True)
                return serve(llm, settings, listening, on_start=_tell)
            finally:
                llm.close()
        finally:
            listening.close()


def serve_settings(model: str | None, values: dict[str, Any]) -> ServeSettings:
    """Return the settings of the flags in `values`. Raises `ConfigError`, also where a package is missing."""
    if values["distributed_executor_backend"] == "external_launcher":
        raise ConfigError(
            "serve takes requests on one rank, and with distributed_executor_backend='external_launcher' every rank "
            "needs them; leave it out."
        )
    missing = missing_packages()
    if missing:
        raise ConfigError(
            f"serve needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            'pip install "piecegraph[serve]".'
        )
    from piecegraph.tools.serve.endpoints.settings import ServeSettings

    names = tuple(values["served_model_name"]) or (model or "SmolLM2-135M-Instruct",)
    settings = ServeSettings(
        host=values["host"],
        port=values["port"],
        served_model_name=names,
        api_keys=read_api_keys(values["api_key_file"]),
        max_body_bytes=values["max_body_bytes"],
        max_concurrent_requests=values["max_concurrent_requests"],
        max_num_queued_reqs=values["max_num_queued_reqs"],
        max_wait_s=values["max_wait"] or None,
        shutdown_timeout_s=values["shutdown_timeout"],
        trust_request_chat_template=values["trust_request_chat_template"],
        lora_modules=tuple(_named_folder(each) for each in values["lora_modules"]),
        allow_runtime_lora_updating=values["allow_runtime_lora_updating"],
        enable_sleep_mode=values["enable_sleep_mode"],
        access_log=values["access_log"],
    )
    for name in ("lora_modules", "allow_runtime_lora_updating"):
        if getattr(settings, name) and not values["enable_lora"]:
            raise ConfigError(f"--{name.replace('_', '-')} is of adapters; give --enable-lora, too.")
    if settings.is_open_to_others and not settings.api_keys:
        click.echo(
            f"warning: {settings.host} may be reached by other machines, and no key is needed; set --api-key-file or "
            f"{environment.API_KEY}.",
            err=True,
        )
    return settings


def _named_folder(text: str) -> tuple[str, str]:
    """Return the name and the folder of `NAME=FOLDER`. Raises `ConfigError` for any other text."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ConfigError(f"--lora-modules {text!r}; it must be NAME=FOLDER, such as sql=./adapters/sql.")
    return name, folder


def missing_packages() -> list[str]:
    """Return the names of the packages of the extra `serve` that are not installed."""
    from importlib.util import find_spec

    return [name for name in PACKAGES if find_spec(name) is None]


def read_api_keys(file: Path | None) -> tuple[str, ...]:
    """Return the keys of the file, one a line, and that of the environment. Raises `ConfigError`."""
    keys = []
    if file is not None:
        try:
            keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file} cannot be read: {error}.") from error
        if not keys:
            raise ConfigError(f"--api-key-file {file} holds no key; write one on each line.")
    from_environment = environment.read(environment.API_KEY)
    return tuple(keys) if from_environment is None else (*keys, from_environment)


def _tell(url: str) -> None:
    click.echo(f"serving on {url} (process {os.getpid()})", err=True)


def _log_to_stderr(*, debug: bool, access_log: bool) -> None:
    """Print warnings, and with `access_log` requests, on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.getLogger("piecegraph").addHandler(handler)
    uvicorn_log = logging.getLogger("uvicorn")
    uvicorn_log.addHandler(handler)
    uvicorn_log.setLevel(logging.INFO if access_log else logging.WARNING)
    if debug:
        logging.getLogger("piecegraph").setLevel(logging.DEBUG)
