"""A step's batch for every group of layers: one metadata each, by one builder."""

from __future__ import annotations

from dataclasses import dataclass

from piecegraph.runner.attention.backend import AttentionMetadataBuilder
from piecegraph.runner.attention.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """One batch: the groups' metadata differ in block table and slot mapping only."""

    groups: tuple[AttentionMetadata, ...]  # one or more

    @property
    def num_tokens(self) -> int:
        """Rows of the batch, padding included."""
        return self.groups[0].num_tokens


@dataclass(frozen=True, slots=True)
class StepMetadataBuilder:
    """A backend's builder, asked once a group: it keeps no batch, so that all groups can share its workspace."""

    of_group: AttentionMetadataBuilder

    def build(self, common: StepMetadata) -> StepMetadata:
        """This step's, for attention that runs between graphs or without any."""
        return StepMetadata(tuple([self.of_group.build(group) for group in common.groups]))

    def init_capture(self, common: StepMetadata) -> StepMetadata:
        """What a FULL graph is captured with; `common` holds the fixed buffers of one bucket."""
        return StepMetadata(tuple([self.of_group.init_capture(group) for group in common.groups]))

    def prepare_for_replay(self, captured: StepMetadata) -> None:
        """Before each replay, once the fixed buffers of `captured` are refilled."""
        for group in captured.groups:
            self.of_group.prepare_for_replay(group)
