"""A head that drafts, at a start: what is refused before anything loads, its compilation, and its passes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from piecegraph.errors import ConfigError
from piecegraph.progress import OnPhase
from piecegraph.runner.device_memory.staged_write import StagedWriteTensor
from piecegraph.runner.models.load import LoadedModel
from piecegraph.runner.speculative.draft_layers import with_draft_layers
from piecegraph.runner.speculative.drafter import Drafter
from piecegraph.runner.speculative.heads.head_config import HeadConfig, MtpConfig, naming_the_head
from piecegraph.runner.speculative.heads.head_step import HeadedStep, HeadStep
from piecegraph.runner.speculative.heads.load_head import load_eagle3, load_mtp
from piecegraph.runner.startup.compiling.compile_model import CompiledLM, compile_model
from piecegraph.runner.startup.drafts.draft import (
    CompiledDraft,
    buffers_for,
    check_pages,
    drafter_of,
    pass_parts,
    reasons_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledHead(CompiledDraft):
    """A compiled head."""

    head: HeadConfig
    target_ids: torch.Tensor | None  # see `LoadedHead`


def compile_head(
    head: HeadConfig | None,
    model: CompiledLM,
    draft: CompiledDraft | None,
    target: LoadedModel,
    lens: tuple[int, int],
    on_phase: OnPhase | None,
) -> tuple[CompiledLM, CompiledDraft | None]:
    """Load and compile the head, and return `model` with the head's layers in its cache, and the head.

    If there is none, return `model` and `draft`, a draft model, as they are. `lens`: the most tokens of a text, and of
    a step.
    """
    if head is None:
        return model, draft
    config = replace(model.config, source=head.source, dtype=target.dtype, is_draft=True, may_raise_block_size=False)
    assert config.speculative is not None
    max_model_len, max_num_tokens = lens
    if max_model_len <= config.speculative.num_speculative_tokens:
        raise ConfigError(
            f"speculative_config: num_speculative_tokens={config.speculative.num_speculative_tokens}, and a text has "
            f"at most max_model_len={max_model_len} tokens; draft fewer."
        )
    with naming_the_head():
        if isinstance(head, MtpConfig):
            loaded = load_mtp(head, target, seed=config.seed)
        else:
            loaded = load_eagle3(head, target, seed=config.seed)
        compiled = compile_model(None, lambda: loaded.loaded, config, max_model_len, max_num_tokens, on_phase)
        check_pages(compiled, model)
    layout, group = with_draft_layers(model.layout, compiled.layers)
    made = CompiledHead(
        model=compiled,
        loaded=loaded.loaded,
        config=config,
        group=group,
        notes=(*loaded.notes, *reasons_of(compiled, model, "head")),
        head=head,
        target_ids=loaded.target_ids,
    )
    return replace(model, layout=layout), made


def make_head_drafter(head: CompiledHead, step: HeadedStep, slots: StagedWriteTensor) -> Drafter:
    """Return the owner of the head's passes over the rows and caches of `step`; nothing is captured yet."""
    head_step = HeadStep(
        **pass_parts(head, step),
        buffers=buffers_for(step, num_first_tokens=1 + step.max_drafts),
        head=head.loaded.model,
        target_ids=head.target_ids,
    )
    return drafter_of(head, head_step, slots)
