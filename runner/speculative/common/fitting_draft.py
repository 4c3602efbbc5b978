"""The model that a config names as its draft: what is refused of it before anything loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from piecegraph.errors import ConfigError, ModelError, UnsupportedModel
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.common.speculative_config import head_kind
from piecegraph.runner.models.checkpoint.files import check_weight_files
from piecegraph.runner.models.config.length import model_length
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.config.tokenizer import load_tokenizer
from piecegraph.runner.models.first_position import first_position
from piecegraph.runner.state_layers.layer import StateLayer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

METHOD = "draft_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingDraft:
    """A draft model whose files fit those of the model."""

    config: EngineConfig  # the engine's, with the draft in place of the model
    hf_config: PreTrainedConfig


def fitting_draft(
    config: EngineConfig,
    hf_config: PreTrainedConfig,
    lens: tuple[int, int],
    *,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
    needs_weights: bool = True,
) -> FittingDraft | None:
    """Return the draft model that `config` names, or None if it names none. No weight is read.

    `lens`: the most tokens of a text, and of a step. `tokenizer`: the model's, if it is loaded. `needs_weights`:
    whether the draft must have files of weights.

    Raises what loading a model raises if there is no such model, and `ConfigError` if it cannot draft for a model with
    `hf_config`. Raises `ConfigError`, whatever the method, if a step of `max_num_tokens` could not verify all drafts of
    a request.
    """
    speculative, (max_model_len, max_num_tokens) = config.speculative, lens
    if speculative is not None and speculative.num_speculative_tokens >= max_num_tokens:
        raise ConfigError(
            f"speculative_config: num_speculative_tokens={speculative.num_speculative_tokens}, and a step computes at "
            f"most max_num_batched_tokens={max_num_tokens} tokens, one more than drafts of a request; draft fewer, or "
            "raise max_num_batched_tokens."
        )
    if speculative is None or speculative.method != METHOD or config.is_draft:
        return None
    with naming_the_draft():
        source = draft_source(config)
        if (kind := head_kind(source.model)) is not None:
            raise ConfigError(
                f"{source.model!r} is a head of kind {kind!r} in the format of the speculators library, and no model; "
                f"give method {kind!r}, or leave the method out."
            )
        found = load_config(source)
        _check_vocabulary(found, hf_config, source)
        model_length(found, max_model_len, first_position(source, found).value)
        if needs_weights:
            check_weight_files(source)
        if tokenizer is not None and _has_tokenizer(source):
            _check_tokenizer(load_tokenizer(source), tokenizer, source)
    of_draft = replace(
        config,
        source=source,
        tokenizer=None,
        dtype=dtype,
        max_model_len=max_model_len,
        may_raise_block_size=False,
        enable_lora=False,  # it drafts for all requests as it is
        lora_target_modules=None,
        is_draft=True,
    )
    return FittingDraft(config=of_draft, hf_config=found)


def draft_source(config: EngineConfig) -> ModelSource:
    """Return the place of the draft model; its weights are random if the model's are."""
    assert config.speculative is not None and config.speculative.model is not None
    source = ModelSource(model=config.speculative.model, trust_remote_code=config.source.trust_remote_code)
    return replace(source, load_format="dummy") if config.source.load_format == "dummy" else source


def refuse_states(config: EngineConfig, layers: Sequence[StateLayer]) -> None:
    """Raise `UnsupportedModel` if `layers` with states belong to a draft model, or to a model that has a head."""
    if config.speculative is None or not layers:
        return
    if config.is_draft:
        raise UnsupportedModel(
            f"{layers[0].name} keeps a state between tokens. The passes of a draft model read tokens again and past "
            "those that are kept, which overwrites keys and values, and a state would need to be taken back each time; "
            "choose a draft model without such layers."
        )
    if config.speculative.method not in ("ngram", "draft_model"):
        raise UnsupportedModel(
            f"{layers[0].name} keeps a state, and a head of method {config.speculative.method!r} drafts for models "
            "with keys and values only; take method 'ngram' or 'draft_model', or leave speculative_config out."
        )


def num_rollback(config: EngineConfig) -> int:
    """Return the tokens by which states must be taken back when drafts are rejected."""
    return 0 if config.speculative is None or config.is_draft else config.speculative.num_speculative_tokens


@contextmanager
def naming_the_draft() -> Iterator[None]:
    """Say of what is refused inside the block that the draft model is meant."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        raise type(error)(f"speculative_config: the draft model: {error}") from error


def _check_vocabulary(found: PreTrainedConfig, wanted: PreTrainedConfig, source: ModelSource) -> None:
    sizes = [one.get_text_config(decoder=True).vocab_size for one in (found, wanted)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{source.model!r} has a vocabulary of {sizes[0]} tokens and the model one of {sizes[1]}; choose a draft "
            "of the same family, with the same vocabulary."
        )


def _has_tokenizer(source: ModelSource) -> bool:
    """Return whether the draft brings a tokenizer that can be compared; drafts in folders often do not."""
    folder = Path(source.location)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
    return source.is_gguf or not folder.is_dir() or any((folder / name).is_file() for name in names)


def _check_tokenizer(found: PreTrainedTokenizerBase, wanted: PreTrainedTokenizerBase, source: ModelSource) -> None:
    ours, theirs = found.get_vocab(), wanted.get_vocab()
    if ours == theirs:
        return
    token = min(
        (token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token)), key=lambda one: (len(one), one)
    )
    raise ConfigError(
        f"{source.model!r} has another tokenizer than the model: {token!r} is token {ours.get(token)} there and "
        f"{theirs.get(token)} here; choose a draft with the model's tokenizer."
    )
