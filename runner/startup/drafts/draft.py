"""A draft model at a start: what is refused before anything loads, its compilation, and its graphs."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.errors import ConfigError, UnsupportedModel
from piecegraph.progress import OnPhase, timed_phase
from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.cudagraphs.capture_sizes import NUM_FIRST_DRAFT_TOKENS
from piecegraph.runner.device_memory.staged_write import StagedWriteTensor
from piecegraph.runner.models.load import LoadedModel, load_model
from piecegraph.runner.models.mechanisms.layer_rules import apply_layer_rules
from piecegraph.runner.models.rope import fix_longrope
from piecegraph.runner.models.without_weights import model_without_weights, stand_in_of
from piecegraph.runner.speculative.common.fitting_draft import fitting_draft, naming_the_draft
from piecegraph.runner.speculative.draft_layers import DraftCaches, DraftLayer, with_draft_layers
from piecegraph.runner.speculative.draft_step import DraftBuffers, DraftStep
from piecegraph.runner.speculative.drafter import Drafter
from piecegraph.runner.speculative.speculative_step import SpeculativeStep
from piecegraph.runner.startup.compiling.compile_model import CompiledLM, compile_model
from piecegraph.runner.state_layers.modules.replace import first_state_layer, has_state_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


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
    loaded: LoadedModel
    config: EngineConfig
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
    *,
    needs_weights: bool = True,
) -> DraftSource | None:
    """Return the draft model that `config` names, or None if it names none. No weight is read.

    Raises what `fitting_draft` raises, and `UnsupportedModel` for a draft that keeps states.
    """
    lens = max_model_len, max_num_tokens
    draft = fitting_draft(config, hf_config, lens, dtype=dtype, tokenizer=tokenizer, needs_weights=needs_weights)
    if draft is None:
        return None
    with naming_the_draft():
        make = functools.partial(model_without_weights, dtype=dtype, device=device, max_model_len=max_model_len)
        stand_in, _ = stand_in_of(functools.partial(make, draft.config.source, draft.hf_config))
        if stand_in is not None and has_state_layers(stand_in.model):
            raise UnsupportedModel(
                f"{type(stand_in.model).__name__} keeps a state between tokens ({first_state_layer(stand_in.model)}). "
                "The passes of a draft model read tokens again and past those that are kept, which overwrites keys and "
                "values, and a state would need to be taken back each time; choose a draft without such layers."
            )
    return DraftSource(
        config=draft.config,
        hf_config=draft.hf_config,
        stand_in=stand_in if config.compile.compiler != "eager" else None,  # eager pieces are not compiled early
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
    )


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
    with naming_the_draft():

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
            notes.extend(apply_layer_rules(loaded.model, draft.max_model_len))
            return loaded

        compiled = compile_model(draft.stand_in, load, config, draft.max_model_len, max_num_tokens, on_phase)
        notes.extend(load().notes)
        check_pages(compiled, model)
    layout, group = with_draft_layers(model.layout, compiled.layers)
    what = "" if group < len(model.layout.groups) else ", in a group of its own"
    note = f"draft model: {config.source.model}, {len(compiled.layers)} layers{what}"
    notes = [note, *notes, *reasons_of(compiled, model, "draft model")]
    return replace(model, layout=layout), CompiledDraft(
        model=compiled, loaded=load(), config=config, group=group, notes=tuple(notes)
    )


def check_pages(compiled: CompiledLM, model: CompiledLM) -> None:
    """Close the compiled draft and raise `ConfigError` unless its attention takes pages of as many tokens."""
    sizes = [one.attention.backend.kernel_block_size(model.config.block_size) for one in (compiled, model)]
    if sizes[0] != sizes[1]:
        compiled.compiled.close()
        raise ConfigError(
            f"its attention needs pages of {sizes[0]} tokens and the model's pages of {sizes[1]}; name an "
            "attention_backend that suits both."
        )


def reasons_of(compiled: CompiledLM, model: CompiledLM, what: str) -> tuple[str, ...]:
    """Return why the draft's graphs are not what was asked for, as far as it is not why the model's are not."""
    known = model.plan.resolved.reasons
    return tuple(f"{what}: {reason}" for reason in compiled.plan.resolved.reasons if reason not in known)


def pass_parts(draft: CompiledDraft, step: SpeculativeStep) -> dict[str, Any]:
    """Return the parts of the passes of a draft model or a head over the rows and caches of `step`, by name."""
    backend = draft.model.attention.backend
    metadata_builder = backend.metadata_builder(
        draft.model.layers, step.block_size, step.buffers.input_ids.device, max_num_reqs=step.buffers.max_num_reqs
    )
    return {
        "forward": draft.model.compiled,
        "impl": backend.impl(),
        "metadata_builder": metadata_builder,
        "needs_host_batch": backend.needs_host_batch,
        "kv_caches": DraftCaches(step.kv_caches),
        "target": step,
        "group": draft.group,
    }


def buffers_for(step: SpeculativeStep, num_first_tokens: int = NUM_FIRST_DRAFT_TOKENS) -> DraftBuffers:
    """Allocate the buffers of passes over the rows of `step`."""
    buffers = step.buffers
    return DraftBuffers(
        max_num_reqs=buffers.max_num_reqs,
        max_blocks=buffers.block_table.shape[2],
        device=buffers.input_ids.device,
        num_first_tokens=num_first_tokens,
    )


def drafter_of(draft: CompiledDraft, draft_step: DraftStep, slots: StagedWriteTensor) -> Drafter:
    """Return the owner of the passes `draft_step`; nothing is captured yet."""
    block_size = draft.model.config.block_size
    return Drafter(step=draft_step, compiled=draft.model.compiled, block_size=block_size, slots=slots)


def make_drafter(draft: CompiledDraft, step: SpeculativeStep, slots: StagedWriteTensor) -> Drafter:
    """Return the owner of a draft model's passes over the rows and caches of `step`; nothing is captured yet."""
    return drafter_of(draft, DraftStep(**pass_parts(draft, step), buffers=buffers_for(step)), slots)


def capture_drafter(
    drafter: Drafter, draft: CompiledDraft, config: EngineConfig, max_bytes: int | None, on_phase: OnPhase | None
) -> None:
    """Capture the draft's passes, for what its plan says."""
    planned = draft.model.plan.full
    with timed_phase(on_phase, "draft graphs") if planned else nullcontext():
        drafter.capture(planned, kind=config.graph_kind, strict=config.strict, max_bytes=max_bytes, on_phase=None)
