"""Every flag that sets a field of `LLM`, `CompileConfig` or `SamplingParams`, under that field's name and default.

All are in one table, because a flag is four things at once: `--max-tokens` on the command line, `max_tokens` in a
config file, `PIECEGRAPH_MAX_TOKENS` in the environment, and the argument `max_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from piecegraph import environment
from piecegraph.config import PASSES, RENAMED_PASSES
from piecegraph.errors import did_you_mean

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag that is handed on only when it is given, so that the default has one home."""

    name: str  # of the field
    type: Any = str
    default: object = None  # the field's own, shown in the help; a test compares them
    help: str
    switch: bool = False  # --name, or --no-name where that is the default's opposite; takes no value
    several: bool = False  # may be given more than once
    short: str | None = None  # another spelling, such as --name

    @property
    def spelling(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return environment.PREFIX + self.name.upper()


class _Numbers(click.ParamType[Any]):
    """Integers separated by commas. A config file may give a list."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        parts = str(value).split(",") if isinstance(value, str | int) else list(value)
        try:
            return tuple(int(part) for part in parts)
        except ValueError:
            self.fail(f"{value!r} is not numbers with commas between them, like 1,2,4,8.", param, ctx)


class _Sizes(_Numbers):
    """Integers separated by commas; `0` alone means no sizes."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        sizes = super().convert(value, param, ctx)
        return () if sizes == (0,) else sizes


class _CaptureSizes(_Sizes):
    """Integers separated by commas, or `traffic`: the sizes that cost least for the steps of earlier engines."""

    name = "sizes|traffic"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "traffic" else super().convert(value, param, ctx)


class _Biases(click.ParamType[Any]):
    """Pairs `token:number` separated by commas. A config file may give a mapping."""

    name = "biases"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[int, float]:
        try:
            pairs = value.items() if isinstance(value, Mapping) else [pair.split(":") for pair in value.split(",")]
            return {int(token): float(bias) for token, bias in pairs}
        except (ValueError, AttributeError):
            self.fail(f"{value!r} is not token:number pairs with commas between them, like 40:5,41:-100.", param, ctx)


class _Mapping(click.ParamType[Any]):
    """A JSON object. A config file may give a mapping."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, Mapping):
            return dict(value)
        try:
            found = json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r} is not JSON: {error}.", param, ctx)
        if not isinstance(found, dict):
            self.fail(f'{value!r} is not a JSON object, like \'{{"method": "ngram"}}\'.', param, ctx)
        return found


class _Range(click.ParamType[Any]):
    """A range `LOW:HIGH`, both included, or one number for both. A config file may give a list of two."""

    name = "low:high"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        parts = list(value) if isinstance(value, list | tuple) else str(value).split(":")
        try:
            low, high = (int(part) for part in (parts * 2 if len(parts) == 1 else parts))
        except ValueError:
            self.fail(f"{value!r} is neither a range like 100:1024 nor a number.", param, ctx)
        if not 1 <= low <= high:
            self.fail(f"{value!r}: a range ascends from 1 or more.", param, ctx)
        return low, high


class _Passes(click.ParamType[Any]):
    """Names of passes separated by commas.

    If each has a minus in front, the passes are those that pay here except the named ones; `none` alone means no
    passes. A config file may give a list.
    """

    name = "passes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        words = [word.strip() for word in (value.split(",") if isinstance(value, str) else map(str, value))]
        if words == ["none"] or not words:
            return ()
        for word in words:
            new_name = RENAMED_PASSES.get(word.removeprefix("-"))
            if new_name is not None:
                self.fail(f"pass {word.removeprefix('-')!r} is named {new_name!r} now.", param, ctx)
            if word.removeprefix("-") not in PASSES:
                self.fail(f"there is no pass {word!r}.{did_you_mean(word.removeprefix('-'), PASSES)}", param, ctx)
        if len({word.startswith("-") for word in words}) > 1:
            self.fail(f"{value!r} both names passes and drops some; do one of the two.", param, ctx)
        return tuple(words)


class Several(click.Option):
    """An option that may be repeated.

    One text from the environment or a config file is one value: click would split it at white space, or into letters.
    """

    def value_from_envvar(self, ctx: click.Context) -> Any:
        value = self.resolve_envvar_value(ctx)
        return None if value is None else (value,)

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        return super().type_cast_value(ctx, (value,) if isinstance(value, str) else value)


NUMBERS = _Numbers()
SIZES = _Sizes()
CAPTURE_SIZES = _CaptureSizes()
BIASES = _Biases()
RANGE = _Range()
MAPPING = _Mapping()
PASS_NAMES = _Passes()

LLM_FLAGS = (
    Flag(
        name="dtype", default="auto", help="float32, bfloat16, float16, or auto: what the checkpoint and device allow."
    ),
    Flag(
        name="quantization",
        help="int8, int4 or fp8: quantise the weights while they load; gguf: keep a GGUF file's blocks.",
    ),
    Flag(name="enable_lora", switch=True, default=False, help="Requests may run with LoRA adapters."),
    Flag(name="max_loras", type=int, default=1, help="Adapters whose requests run at once, at most."),
    Flag(name="max_lora_rank", type=int, default=16, help="Largest rank of an adapter."),
    Flag(name="max_cpu_loras", type=int, help="Adapters that stay loaded. [default: --max-loras]"),
    Flag(
        name="kv_cache_dtype",
        type=click.Choice(["auto", "fp8", "fp8_e4m3"]),
        default="auto",
        help="What keys and values are kept in: the model's dtype, or float8 (e4m3).",
    ),
    Flag(
        name="calculate_kv_scales",
        switch=True,
        default=False,
        help="Calibrate the scales of float8 keys and values at the start.",
    ),
    Flag(name="device", help="cpu, cuda or cuda:N. Without it: a GPU if there is one."),
    Flag(name="max_model_len", type=int, help="Longest prompt and answer together, in tokens."),
    Flag(name="compiler", type=click.Choice(["inductor", "eager"]), help="What compiles a piece; without it inductor."),
    Flag(name="attention_backend", default="auto", help="What runs attention: auto, triton, flash_attn or sdpa."),
    Flag(
        name="load_format",
        type=click.Choice(["auto", "safetensors", "gguf", "dummy"]),
        default="auto",
        help="What the weights are read from; dummy makes random ones.",
    ),
    Flag(name="kv_cache_memory_bytes", type=int, help="Size of the KV cache. [default: what is left; on a CPU 4 GiB]"),
    Flag(name="gpu_memory_utilization", type=float, default=0.9, help="Share of the GPU's memory to use."),
    Flag(
        name="cudagraph_mode",
        type=click.Choice(
            ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"], case_sensitive=False
        ),
        default="FULL_AND_PIECEWISE",
        help="Which CUDA graphs batches run under.",
    ),
    Flag(
        name="cudagraph_capture_sizes",
        type=CAPTURE_SIZES,
        help="Padded token counts to capture: 1,2,4,8; traffic: those that suit what was run. [default: a ladder]",
    ),
    Flag(name="compile_sizes", type=SIZES, help="Token counts compiled statically: 1,2,4; none: 0."),
    Flag(
        name="graph_kind",
        type=click.Choice(["auto", "cuda", "recorded"]),
        default="auto",
        help="recorded: the rules of graphs without a GPU; without the speed, unless all weights are int8.",
    ),
    Flag(
        name="measure_graphs",
        switch=True,
        default=False,
        help="Measure graphs at the start, and run each batch under the cheapest one.",
    ),
    Flag(
        name="start",
        type=click.Choice(["fast", "full"]),
        default="full",
        help="fast: answer while pieces compile and graphs are captured.",
    ),
    Flag(
        name="enable_sleep_mode",
        switch=True,
        default=False,
        help="Have the memory of weights and cache such that LLM.sleep can give it back; serve: add POST /sleep.",
    ),
    Flag(name="strict", switch=True, default=False, help="Refuse to run a batch in a slower way than asked for."),
    Flag(
        name="max_num_seqs",
        type=int,
        help="Requests that run at once, at most; 256 unless a step has fewer tokens.",
    ),
    Flag(name="max_num_batched_tokens", type=int, help="Tokens one step computes, at most."),
    Flag(name="block_size", type=int, help="Tokens a block of the cache holds."),
    Flag(name="enforce_eager", switch=True, default=False, help="Compile and capture nothing."),
    Flag(
        name="tensor_parallel_size",
        short="-tp",
        type=int,
        default=1,
        help="Ranks that each layer is divided among.",
    ),
    Flag(
        name="data_parallel_size",
        short="-dp",
        type=int,
        default=1,
        help="Engines, each with a cache of its own, that requests are divided among.",
    ),
    Flag(name="nnodes", type=int, default=1, help="Machines that the ranks are divided among, without Ray."),
    Flag(name="node_rank", type=int, default=0, help="Which of them this is; on 0 the command does its work."),
    Flag(name="master_addr", default="127.0.0.1", help="Address of machine 0, the same on all."),
    Flag(name="master_port", type=int, default=29501, help="Free port of machine 0, the same on all."),
    Flag(
        name="enable_expert_parallel",
        short="-ep",
        switch=True,
        default=False,
        help="Each rank, of all engines of --data-parallel-size, holds some experts whole.",
    ),
    Flag(
        name="pipeline_parallel_size",
        short="-pp",
        type=int,
        default=1,
        help="Stages that layers are divided among, each of --tensor-parallel-size ranks.",
    ),
    Flag(
        name="distributed_executor_backend",
        type=click.Choice(["uniproc", "mp", "ray", "external_launcher"]),
        help="Who runs the ranks: mp on this machine, ray on a cluster, external_launcher under torchrun. "
        "[default: uniproc for one rank, mp for several]",
    ),
    Flag(
        name="speculative_config",
        short="--speculative",
        type=MAPPING,
        help='Draft tokens and verify them together: \'{"method": "ngram", "num_speculative_tokens": 4}\'.',
    ),
)

COMPILE_FLAGS = (
    Flag(
        name="passes",
        type=PASS_NAMES,
        help="Passes over the graph: names with commas; none; or -name, to drop one of those that pay on the device. "
        "[default: those that pay]",
    ),
    Flag(
        name="selfcheck",
        switch=True,
        default=False,
        help="At start, compare every piece and every graph with the model as traced; a difference is an error.",
    ),
)
"""Flags that are fields of `LLM`'s `compilation_config`, a `CompileConfig`."""

SAMPLING_FLAGS = (
    Flag(name="max_tokens", type=int, default=16, help="Longest answer, in tokens."),
    Flag(name="min_tokens", type=int, default=0, help="No end before this many tokens."),
    Flag(name="n", type=int, default=1, help="Answers to give; more than one needs a temperature."),
    Flag(name="temperature", type=float, default=1.0, help="0 takes the likeliest token each time."),
    Flag(
        name="top_p", type=float, default=1.0, help="Sample among the likeliest tokens that make up this probability."
    ),
    Flag(name="top_k", type=int, default=0, help="Sample among this many likeliest tokens; 0: among all."),
    Flag(
        name="min_p",
        type=float,
        default=0.0,
        help="Sample among tokens at least this many times as likely as the likeliest.",
    ),
    Flag(name="seed", type=int, help="Makes sampling repeatable."),
    Flag(
        name="presence_penalty", type=float, default=0.0, help="Taken from the logits of tokens in the answer so far."
    ),
    Flag(name="frequency_penalty", type=float, default=0.0, help="The same, for each time a token is in it."),
    Flag(
        name="repetition_penalty",
        type=float,
        default=1.0,
        help="Above 1 makes tokens of prompt and answer less likely, below 1 likelier.",
    ),
    Flag(name="stop", several=True, help="Text that ends the answer and is not part of it. May be repeated."),
    Flag(name="stop_token_ids", type=NUMBERS, help="Tokens that end the answer: 2,13."),
    Flag(
        name="include_stop_str_in_output",
        switch=True,
        default=False,
        help="What ends the answer is part of it.",
    ),
    Flag(name="ignore_eos", switch=True, default=False, help="Go on after an end-of-sequence token."),
    Flag(name="bad_words", several=True, help="Text not to write. May be repeated."),
    Flag(name="allowed_token_ids", type=NUMBERS, help="Sample among these tokens only: 40,41."),
    Flag(name="logit_bias", type=BIASES, help="Added to the logits of tokens: 40:5,41:-100."),
    Flag(name="logprobs", type=int, help="With --json: log probabilities of this many tokens at each step; -1: all."),
    Flag(name="prompt_logprobs", type=int, help="With --json: the same for the prompt."),
    Flag(name="truncate_prompt_tokens", type=int, help="Use this many tokens at the prompt's end; -1: what fits."),
    Flag(name="skip_special_tokens", switch=True, default=True, help="Leave special tokens out of the text."),
    Flag(name="detokenize", switch=True, default=True, help="Make text of the tokens."),
)


def flags(table: Sequence[Flag], **shown_defaults: object) -> Callable[[_Command], _Command]:
    """Decorate a command with the options of `table`.

    `shown_defaults` replaces a default that the command itself sets.
    """

    def decorate(command: _Command) -> _Command:
        for flag in reversed(table):
            default = shown_defaults.get(flag.name, flag.default)
            kind: dict[str, Any] = {"is_flag": True} if flag.switch else {"type": flag.type}
            if flag.several:
                kind |= {"cls": Several, "multiple": True}
            spelling = f"{flag.spelling}/--no-{flag.spelling[2:]}" if flag.switch and flag.default else flag.spelling
            default_text = "" if default is None or flag.switch else f" [default: {default}]"
            spellings = [spelling] if flag.short is None else [spelling, flag.short]
            option = click.option(
                *spellings, flag.name, default=None, envvar=flag.variable, help=flag.help + default_text, **kind
            )
            command = option(command)
        return command

    return decorate


def batch_sizes(*default: int) -> Callable[[_Command], _Command]:
    """Decorate a benchmark with `--batch-size`, which it takes as `batch_sizes`."""
    return click.option(
        "--batch-size",
        "batch_sizes",
        type=click.IntRange(min=1),
        multiple=True,
        default=default,
        show_default=True,
        help="Requests that decode together; one or several.",
    )


def given(table: Sequence[Flag], values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that were set by flag, config file or environment."""
    found = {flag.name: values[flag.name] for flag in table if values[flag.name] is not None}
    for flag in table:
        if flag.several and not found.get(flag.name):
            found.pop(flag.name, None)  # click's "none" of what may be repeated is an empty tuple
    return found


NEIGHBOURS = {
    "--max-new-tokens": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--num-tokens": "--max-tokens",
    "--max-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--num-ctx": "--max-model-len",
    "--context-length": "--max-model-len",
    "--max-seq-len": "--max-model-len",
    "--temp": "--temperature",
    "--topp": "--top-p",
    "--topk": "--top-k",
    "--random-seed": "--seed",
    "--torch-dtype": "--dtype",
    "--precision": "--dtype",
    "--backend": "--compiler",
    "--attn-implementation": "--attention-backend",
    "--attn-backend": "--attention-backend",
    "--eager": "--enforce-eager",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--gpu-mem": "--gpu-memory-utilization",
    "--verbose": "--debug",
    "--silent": "--quiet",
    "--raw": "--no-chat",
    "--no-conversation": "--no-chat",
    "--conversation": "--chat",
    "--model": "the argument MODEL: piecegraph run MODEL PROMPT",
    "--prompt": "the argument PROMPT: piecegraph run MODEL PROMPT",
}
"""Our names of options that transformers, llama.cpp, Ollama and SGLang spell differently."""


CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""`context_settings` of every command."""


def with_flags_repeated(params: Sequence[click.Parameter], args: Sequence[str]) -> list[str]:
    """Repeat the flag of an option with several values before each value, so that click accepts `--batch-size 1 8 32`.

    A word belongs to the flag as long as it is a value the option can have. Options whose values are any text take one
    value only, because every following word could be one.
    """
    repeatable = {
        flag: param
        for param in params
        if param.multiple and isinstance(param.type, click.IntRange | click.FloatRange | click.Choice)
        for flag in param.opts
    }
    end = args.index("--") if "--" in args else len(args)  # words after it are not our flags
    written: list[str] = []
    flag = ""  # that the words are values of
    num_values = 0
    for word in args[:end]:
        if flag and num_values and _is_value(repeatable[flag], word):
            written += [flag, word]
            continue
        written.append(word)
        num_values = num_values + 1 if flag and not num_values else 0
        if word in repeatable:
            flag, num_values = word, 0
        elif num_values == 0:
            flag = ""
    return [*written, *args[end:]]


def _is_value(param: click.Parameter, word: str) -> bool:
    if word.startswith("-"):
        return False
    try:
        param.type.convert(word, param, None)
    except click.BadParameter:
        return False
    return True


class Command(click.Command):
    """A command that suggests the nearest option for a misspelt one and refuses unknown `PIECEGRAPH_*` variables."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, with_flags_repeated(self.params, args))
        except click.NoSuchOption as error:
            dashed = error.option_name.replace("_", "-")
            is_ours = any(dashed in option.opts for option in self.params)
            ours = dashed if is_ours else NEIGHBOURS.get(error.option_name)
            if ours is None:
                raise
            raise click.UsageError(f"No such option {error.option_name!r}. Did you mean {ours}?", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        from piecegraph.tools.command_line.quiet import only_rank_0_writes
        from piecegraph.tools.command_line.settings import check_environment

        check_environment()
        if ctx.params.get("node_rank"):
            from piecegraph.runner.clusters.node import serve_node_as

            return serve_node_as(given(LLM_FLAGS, ctx.params))
        with only_rank_0_writes(ctx):
            return super().invoke(ctx)
