"""A draft model at a start: what is refused before anything loads, its compilation, and its graphs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from piecegraph.errors import ConfigError, ModelError, UnsupportedModel
from piecegraph.progress import OnPhase, timed_phase
from piecegraph.runner.attention.interface.backend import AttentionCGSupport
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.device_memory.staged_write import StagedWriteTensor
from piecegraph.runner.models.first_position import first_position
from piecegraph.runner.models.length import model_length
from piecegraph.runner.models.load import (
    LoadedModel,
    check_weight_files,
    load_config,
    load_model,
    load_tokenizer,
)
from piecegraph.runner.models.rope import fix_longrope
from piecegraph.runner.models.without_weights import stand_in_for
from piecegraph.runner.speculative.draft_layers import DraftCaches, DraftLayer, with_draft_layers
from piecegraph.runner.speculative.draft_step import DraftBuffers, DraftStep
from piecegraph.runner.speculative.drafter import Drafter
from piecegraph.runner.speculative.speculative_step import SpeculativeStep
from piecegraph.runner.startup.compile_model import CompiledLM, compile_model
from piecegraph.runner.state_layers.modules.replace import has_state_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

METHOD = "draft_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """A draft model that fits, before it is loaded."""

    config: EngineConfig  # the engine's, with the draft in place of the model
    hf_config: PreTrainedConfig
    stand_in: LoadedModel | None  # the model without weights, to trace; None: it is traced with them
    dtype: torch.dtype
    device: torch.device
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledDraft:
    """A compiled draft model."""

    model: CompiledLM
    group: int  # of the model's groups of layers, whose block tables the draft uses
    notes: tuple[str, ...]

    @property
    def cached_layers(self) -> tuple[DraftLayer, ...]:
        """The layers under their names in the cache."""
        return tuple(DraftLayer.of(layer) for layer in self.model.layers)


def check_draft(
    config: EngineConfig,
    hf_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    max_num_tokens: int,
) -> DraftSource | None:
    """Return the draft model that `config` names, or None if it names none. No weight is read.

    Raises what loading a model raises if there is no such model, and `ConfigError` or `UnsupportedModel` if it cannot
    draft for a model with `hf_config` and `tokenizer`. Raises `ConfigError`, whatever the method, if a step of
    `max_num_tokens` could not verify all drafts of a request.
    """
    speculative = config.speculative
    if speculative is not None and speculative.num_speculative_tokens >= max_num_tokens:
        raise ConfigError(
            f"speculative_config: num_speculative_tokens={speculative.num_speculative_tokens}, and a step computes at "
            f"most max_num_batched_tokens={max_num_tokens} tokens, one more than drafts of a request; draft fewer, or "
            "raise max_num_batched_tokens."
        )
    if speculative is None or speculative.method != METHOD:
        return None
    with _naming_the_draft():
        source = draft_source(config)
        found = load_config(source)
        _check_vocabulary(found, hf_config, source)
        model_length(found, max_model_len, first_position(source, found).value)
        check_weight_files(source)
        if tokenizer is not None and _has_tokenizer(source):
            _check_tokenizer(load_tokenizer(source), tokenizer, source)
        stand_in, _ = stand_in_for(source, found, dtype=dtype, device=device, max_model_len=max_model_len)
        if stand_in is not None and has_state_layers(stand_in.model):
            raise UnsupportedModel(
                f"{type(stand_in.model).__name__} keeps a state between tokens, which cannot be taken back when a "
                "draft is rejected."
            )
    return DraftSource(
        config=replace(config, source=source, tokenizer=None, may_raise_block_size=False),
        hf_config=found,
        stand_in=stand_in if config.compile.compiler != "eager" else None,  # eager pieces are not compiled early
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
    )


def draft_source(config: EngineConfig) -> ModelSource:
    """Return the place of the draft model; its weights are random if the model's are."""
    assert config.speculative is not None and config.speculative.model is not None
    source = ModelSource(model=config.speculative.model, trust_remote_code=config.source.trust_remote_code)
    return replace(source, load_format="dummy") if config.source.load_format == "dummy" else source


def compile_draft(
    draft: DraftSource | None, model: CompiledLM, max_num_tokens: int, on_phase: OnPhase | None
) -> tuple[CompiledLM, CompiledDraft | None]:
    """Load and compile the draft model, and return `model` with the draft's layers in its cache, and the draft.

    If there is none, return `model` itself.
    """
    if draft is None:
        return model, None
    config = replace(draft.config, block_size=model.config.block_size)
    notes: list[str] = []
    with _naming_the_draft():

        @functools.cache
        def load() -> LoadedModel:
            loaded = load_model(
                config.source,
                draft.hf_config,
                dtype=draft.dtype,
                device=draft.device,
                seed=config.seed,
                on_phase=on_phase,
            )
            notes.extend(fix_longrope(loaded.model, draft.max_model_len))
            return loaded

        compiled = compile_model(draft.stand_in, load, config, draft.max_model_len, max_num_tokens, on_phase)
        notes.extend(load().notes)
        sizes = [one.attention.backend.kernel_block_size(config.block_size) for one in (compiled, model)]
        if sizes[0] != sizes[1]:
            compiled.compiled.close()
            raise ConfigError(
                f"its attention needs pages of {sizes[0]} tokens and the model's pages of {sizes[1]}; name an "
                "attention_backend that suits both."
            )
    layout, group = with_draft_layers(model.layout, compiled.layers)
    what = "" if group < len(model.layout.groups) else ", in a group of its own"
    note = f"draft model: {config.source.model}, {len(compiled.layers)} layers{what}"
    return replace(model, layout=layout), CompiledDraft(model=compiled, group=group, notes=(note, *notes))


def make_drafter(draft: CompiledDraft, step: SpeculativeStep, slots: StagedWriteTensor) -> Drafter:
    """Return the owner of the draft's passes over the rows and caches of `step`; nothing is captured yet."""
    backend, device = draft.model.attention.backend, step.buffers.input_ids.device
    draft_step = DraftStep(
        forward=draft.model.compiled,
        impl=backend.impl(),
        metadata_builder=backend.metadata_builder(
            draft.model.layers, step.block_size, device, max_num_reqs=step.buffers.max_num_reqs
        ),
        needs_host_batch=backend.needs_host_batch,
        kv_caches=DraftCaches(step.kv_caches),
        target=step,
        group=draft.group,
        buffers=DraftBuffers(
            max_num_reqs=step.buffers.max_num_reqs, max_blocks=step.buffers.block_table.shape[2], device=device
        ),
    )
    return Drafter(
        step=draft_step, compiled=draft.model.compiled, block_size=draft.model.config.block_size, slots=slots
    )


def capture_drafter(
    drafter: Drafter, draft: CompiledDraft, config: EngineConfig, max_bytes: int | None, on_phase: OnPhase | None
) -> None:
    """Capture the draft's passes for the numbers of requests that decode has graphs for."""
    plan, backend = draft.model.plan, draft.model.attention.backend
    if backend.cudagraph_support < AttentionCGSupport.UNIFORM_BATCH:
        return
    sizes = sorted({one.num_reqs for one in plan.full if one.uniform_token_count == 1 and one.num_reqs is not None})
    with timed_phase(on_phase, "draft graphs") if sizes else nullcontext():
        drafter.capture(sizes, kind=config.graph_kind, strict=config.strict, max_bytes=max_bytes, on_phase=None)


@contextmanager
def _naming_the_draft() -> Iterator[None]:
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
