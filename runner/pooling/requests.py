"""`LLM.embed`, `classify`, `score` and `encode`: from prompts to texts, through the engine, to outputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.errors import RequestError, UnsupportedModel
from piecegraph.runner.pooling.engine import PooledOutput
from piecegraph.runner.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from piecegraph.runner.pooling.params import PoolingParams
from piecegraph.runner.pooling.step import Text
from piecegraph.runner.pooling.task import PoolingTask
from piecegraph.runner.prompts.tokenize import Prompt, Prompts, prompt_sequence, tokenize

if TYPE_CHECKING:
    from piecegraph.runner.pooling.load import LoadedPooler

Params = PoolingParams | Sequence[PoolingParams] | None
Shown = bool | Callable[..., Any]


def embed(
    pooler: LoadedPooler, prompts: Prompts, params: Params, shown: Shown, options: Mapping[str, Any] | None
) -> list[EmbeddingRequestOutput]:
    """Return the embedding of each prompt."""
    _check_task(pooler, PoolingTask.EMBED, "embed")
    return [
        EmbeddingRequestOutput(
            request_id=one.request_id,
            outputs=EmbeddingOutput(one.outputs.data.tolist()),
            prompt_token_ids=one.prompt_token_ids,
        )
        for one in encode(pooler, prompts, params, shown, options)
    ]


def classify(
    pooler: LoadedPooler, prompts: Prompts, params: Params, shown: Shown, options: Mapping[str, Any] | None
) -> list[ClassificationRequestOutput]:
    """Return the probabilities of each prompt's classes."""
    _check_task(pooler, PoolingTask.CLASSIFY, "classify")
    return [
        ClassificationRequestOutput(
            request_id=one.request_id,
            outputs=ClassificationOutput(one.outputs.data.tolist()),
            prompt_token_ids=one.prompt_token_ids,
        )
        for one in encode(pooler, prompts, params, shown, options)
    ]


def encode(
    pooler: LoadedPooler,
    prompts: Prompts,
    params: Params,
    shown: Shown,
    options: Mapping[str, Any] | None,
    *,
    of_tokens: bool = False,
) -> list[PooledOutput]:
    """Return what is pooled of each prompt, as tensors; `of_tokens`: a row for each of its tokens."""
    several = prompt_sequence(prompts)
    per_prompt = _per_prompt(params, len(several))
    texts = [tokenized_text(pooler, prompt, one, options) for prompt, one in zip(several, per_prompt, strict=True)]
    return _run(pooler, texts, per_prompt, shown, of_tokens=of_tokens)


def score(
    pooler: LoadedPooler,
    data_1: Prompts,
    data_2: Prompts,
    params: PoolingParams | None,
    shown: Shown,
    options: Mapping[str, Any] | None,
) -> list[ScoringRequestOutput]:
    """Return how well each pair of texts matches; one `data_1` is compared with every `data_2`.

    A classifier with one label reads both texts of a pair at once (a cross-encoder). Other models embed each text, and
    the score is the cosine of the two embeddings.
    """
    first, second = list(prompt_sequence(data_1)), list(prompt_sequence(data_2))
    if not first or not second:
        raise RequestError(f"data_1 has {len(first)} texts and data_2 has {len(second)}; give one or more of each.")
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"data_1 has {len(first)} texts and data_2 has {len(second)}; data_1 may have one, or as many."
        )
    one = PoolingParams() if params is None else _single(params)
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    if pooler.task is PoolingTask.CLASSIFY:
        if pooler.engine.rules.size != 1:
            raise UnsupportedModel(
                f"a score needs a classifier with one label or a model that embeds; this one has "
                f"{pooler.engine.rules.size} labels. Use classify."
            )
        found = _run(pooler, [_pair(pooler, a, b, one, options) for a, b in pairs], [one] * len(pairs), shown)
        return [_scored(each.request_id, each.outputs.data.item(), each.prompt_token_ids) for each in found]
    texts = [tokenized_text(pooler, prompt, one, options) for prompt in (*first, *second)]
    found = _run(pooler, texts, [one] * len(texts), shown)
    left, right = found[: len(first)], found[len(first) :]
    left = left * len(right) if len(left) == 1 else left
    return [
        _scored(
            b.request_id,
            torch.nn.functional.cosine_similarity(a.outputs.data, b.outputs.data, dim=0).item(),
            a.prompt_token_ids + b.prompt_token_ids,
        )
        for a, b in zip(left, right, strict=True)
    ]


def _scored(request_id: str, value: float, token_ids: list[int]) -> ScoringRequestOutput:
    return ScoringRequestOutput(request_id=request_id, outputs=ScoringOutput(value), prompt_token_ids=token_ids)


def checked_task(pooler: LoadedPooler, name: str | None) -> bool:
    """Return whether the task of `encode` is about each token.

    Raises `RequestError` for an unknown task, and `UnsupportedModel` if the model was loaded for another one, or pools
    several rows of a text, which a token does not have.
    """
    if name is None:
        return False
    known = {task.value: task for task in PoolingTask}
    if name not in known:
        raise RequestError(f"pooling_task={name!r}; it may be {', '.join(map(repr, known))} here.")
    of_tokens = known[name] is PoolingTask.TOKEN_EMBED
    _check_task(pooler, PoolingTask.EMBED if of_tokens else known[name], f"pooling_task={name!r}")
    pooled = pooler.runner.step.pooling
    if of_tokens and len(pooled) > 1:
        raise UnsupportedModel(
            f"pooling_task={name!r}: the model's embeddings are {len(pooled)} rows of a text, one after the other "
            f"({', '.join(kind.value for kind in pooled)}), and a token has one; use embed."
        )
    return of_tokens


def _check_task(pooler: LoadedPooler, task: PoolingTask, method: str) -> None:
    """Raise `UnsupportedModel` if the model was loaded for another task."""
    if pooler.task is task:
        return
    if task is PoolingTask.CLASSIFY:
        raise UnsupportedModel(
            "classify needs a model with a head for classification, and this one was loaded to embed texts. Use embed, "
            "or load a model for sequence classification."
        )
    raise UnsupportedModel(
        f"{method} needs embeddings, and this model was loaded as a classifier. Use classify, or load it without its "
        "head: LLM(model, convert='embed')."
    )


def _per_prompt(params: Params, count: int) -> list[PoolingParams]:
    """Return parameters for each of `count` prompts. Raises `RequestError`."""
    if params is None or isinstance(params, PoolingParams):
        return [PoolingParams() if params is None else params] * count
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise RequestError(f"pooling_params={params!r}; it must be PoolingParams, one or one per prompt.")
    several = [_single(one) for one in params]
    if len(several) != count:
        raise RequestError(f"{count} prompts, but {len(several)} pooling_params; give one, or one per prompt.")
    return several


def _single(params: object) -> PoolingParams:
    if not isinstance(params, PoolingParams):
        raise RequestError(f"pooling_params={params!r}; it must be PoolingParams.")
    return params


def tokenized_text(
    pooler: LoadedPooler, prompt: Prompt, params: PoolingParams, options: Mapping[str, Any] | None
) -> Text:
    """Convert a prompt to token ids; `options` are passed to the tokenizer. Raises `RequestError`."""
    if isinstance(prompt, str) and pooler.do_lower_case:
        prompt = prompt.lower()
    is_text = isinstance(prompt, str) or (isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None)
    if params.truncate_prompt_tokens is not None and not is_text:
        raise RequestError(
            "truncate_prompt_tokens is for texts, which the tokenizer cuts; shorten token ids before they are given."
        )
    tokenized = tokenize(
        prompt,
        pooler.tokenizer,
        {**_truncation(pooler, params, options or {}, is_pair=False), **(options or {})} or None,
    )
    if tokenized.embeds is not None:
        raise RequestError("prompt_embeds cannot be pooled; give a text or token ids.")
    return Text(token_ids=tokenized.token_ids)


def _pair(
    pooler: LoadedPooler, first: Prompt, second: Prompt, params: PoolingParams, options: Mapping[str, Any] | None
) -> Text:
    """Convert two texts to the token ids of their pair, as the tokenizer joins them. Raises `RequestError`."""
    if pooler.tokenizer is None:
        raise RequestError("a pair of texts needs a tokenizer, and there is none (skip_tokenizer_init).")
    texts = [each.get("prompt") if isinstance(each, Mapping) else each for each in (first, second)]
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(
                f"a cross-encoder scores two texts, and one is {text!r}; give strings that are not empty."
            )
    given = {**_truncation(pooler, params, options or {}, is_pair=True), **(options or {})}
    try:
        found = pooler.tokenizer(texts[0], texts[1], verbose=False, **given)
    except (TypeError, ValueError) as error:
        raise RequestError(f"the tokenizer refused a pair of texts with {given}: {error}") from error
    kinds = found.get("token_type_ids") if pooler.engine.num_token_types else None
    return Text(token_ids=list(found["input_ids"]), token_type_ids=None if kinds is None else list(kinds))


def _truncation(
    pooler: LoadedPooler, params: PoolingParams, options: Mapping[str, Any], *, is_pair: bool
) -> dict[str, Any]:
    """Return the tokenizer's arguments for `truncate_prompt_tokens`, beside `options`. Raises `RequestError`."""
    wanted = params.truncate_prompt_tokens
    if wanted is None:
        return {}
    if wanted > pooler.max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens={wanted}, but the model takes at most {pooler.max_model_len} tokens; give -1."
        )
    tokenizer = pooler.tokenizer if options.get("add_special_tokens", True) else None
    added = 0 if tokenizer is None else tokenizer.num_special_tokens_to_add(pair=is_pair)
    if -1 < wanted < added:  # which tokenizers answer with the whole text
        raise RequestError(
            f"truncate_prompt_tokens={wanted}, and the tokenizer adds {added} tokens of its own to a text; give "
            f"{added + 1} or more, or -1."
        )
    return {"truncation": True, "max_length": pooler.max_model_len if wanted == -1 else wanted}


def _run(
    pooler: LoadedPooler,
    texts: Sequence[Text],
    params: Sequence[PoolingParams],
    shown: Shown,
    *,
    of_tokens: bool = False,
) -> list[PooledOutput]:
    """Run texts, all of them checked before any is queued, and return their outputs in order."""
    engine = pooler.engine
    for text, one in zip(texts, params, strict=True):
        engine.check_request(text, one)
    ids = engine.new_ids(len(texts))
    waiting = set(ids)
    found: dict[str, PooledOutput] = {}
    try:
        for request_id, text, one in zip(ids, texts, params, strict=True):
            engine.add_request(request_id, text, one, of_tokens=of_tokens)
        with _progress(len(texts), shown) as advance:
            while waiting:
                outputs = [output for output in engine.step() if output.request_id in waiting]
                found.update({output.request_id: output for output in outputs})
                waiting.difference_update(output.request_id for output in outputs)
                advance(len(outputs))
    finally:
        for request_id in waiting:
            engine.abort(request_id)
    return [found[request_id] for request_id in ids]


@contextmanager
def _progress(total: int, shown: Shown) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how many prompts are done; `shown` is as in `progress_bar`."""
    if callable(shown):
        bar = shown(total=total, desc="Processed prompts", dynamic_ncols=True)
        try:
            yield bar.update
        finally:
            bar.close()
    elif not shown or not sys.stderr.isatty():
        yield lambda done: None
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("pool", total=total)
            yield lambda done: progress.update(task, advance=done)
