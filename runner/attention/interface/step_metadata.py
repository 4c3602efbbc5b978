"""A step's metadata for every group of layers, built by one builder."""

from __future__ import annotations

from dataclasses import dataclass

from piecegraph.runner.attention.interface.backend import AttentionMetadataBuilder
from piecegraph.runner.attention.interface.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """The metadata of one batch; those of its groups differ in block table and slot mapping only."""

    groups: tuple[AttentionMetadata, ...]  # one or more

    @property
    def num_tokens(self) -> int:
        """The number of rows of the batch, padding included."""
        return self.groups[0].num_tokens


@dataclass(frozen=True, slots=True)
class StepMetadataBuilder:
    """The builders, called once a group. A builder keeps no batch, so all groups of attention share one workspace."""

    of_group: AttentionMetadataBuilder
    of_groups: tuple[AttentionMetadataBuilder, ...] = ()  # of each group; empty: `of_group` builds all

    def build(self, common: StepMetadata) -> StepMetadata:
        """Return this step's metadata, for attention that runs between graphs or without any."""
        if self.of_groups:
            return StepMetadata(tuple([b.build(g) for b, g in zip(self.of_groups, common.groups, strict=True)]))
        return StepMetadata(tuple([self.of_group.build(group) for group in common.groups]))

    def init_capture(self, common: StepMetadata) -> StepMetadata:
        """Return the metadata a FULL graph is captured with; `common` holds the fixed buffers of one bucket."""
        if self.of_groups:
            return StepMetadata(tuple([b.init_capture(g) for b, g in zip(self.of_groups, common.groups, strict=True)]))
        return StepMetadata(tuple([self.of_group.init_capture(group) for group in common.groups]))

    def prepare_for_replay(self, captured: StepMetadata) -> None:
        """Refill the builder's own buffers before a replay, once the fixed buffers of `captured` are refilled."""
        if self.of_groups:
            for builder, group in zip(self.of_groups, captured.groups, strict=True):
                builder.prepare_for_replay(group)
            return
        for group in captured.groups:
            self.of_group.prepare_for_replay(group)
