"""One builder is asked once a group, whatever it is asked."""

from __future__ import annotations

from dataclasses import replace

from piecegraph.runner.attention.interface.metadata import AttentionMetadata
from piecegraph.runner.attention.interface.step_metadata import StepMetadata, StepMetadataBuilder
from tests.runner.attention.paged_case import make_case


class Marks:
    """Answers with another number of tokens, and keeps what it was given."""

    def __init__(self) -> None:
        self.replayed: list[AttentionMetadata] = []

    def build(self, common: AttentionMetadata) -> AttentionMetadata:
        return replace(common, num_tokens=common.num_tokens + 1)

    def init_capture(self, common: AttentionMetadata) -> AttentionMetadata:
        return replace(common, num_tokens=common.num_tokens + 100)

    def prepare_for_replay(self, captured: AttentionMetadata) -> None:
        self.replayed.append(captured)


def test_every_group_is_built_captured_and_replayed() -> None:
    marks = Marks()
    builder = StepMetadataBuilder(marks)
    first = make_case(lens=[(3, 2)]).metadata
    second = replace(first, block_table=first.block_table + 1)
    common = StepMetadata((first, second))
    assert common.num_tokens == 2
    assert [group.num_tokens for group in builder.build(common).groups] == [3, 3]
    captured = builder.init_capture(common)
    assert [group.num_tokens for group in captured.groups] == [102, 102]
    assert captured.groups[1].block_table is second.block_table
    builder.prepare_for_replay(captured)
    assert all(seen is group for seen, group in zip(marks.replayed, captured.groups, strict=True))
