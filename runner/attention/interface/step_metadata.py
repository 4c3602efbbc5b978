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
    """A backend's builder, called once a group. The builder keeps no batch, so all groups can share its workspace."""

    of_group: AttentionMetadataBuilder

    def build(self, common: StepMetadata) -> StepMetadata:
        """Return this step's metadata, for attention that runs between graphs or without any."""
        return StepMetadata(tuple([self.of_group.build(group) for group in common.groups]))

    def init_capture(self, common: StepMetadata) -> StepMetadata:
        """Return the metadata a FULL graph is captured with; `common` holds the fixed buffers of one bucket."""
        return StepMetadata(tuple([self.of_group.init_capture(group) for group in common.groups]))

    def prepare_for_replay(self, captured: StepMetadata) -> None:
        """Refill the builder's own buffers before a replay, once the fixed buffers of `captured` are refilled."""
        for group in captured.groups:
            self.of_group.prepare_for_replay(group)
