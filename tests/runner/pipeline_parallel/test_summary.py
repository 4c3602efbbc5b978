from __future__ import annotations

from typing import Any

from piecegraph.runner.pipeline_parallel.stage import Stage, StageCut
from piecegraph.runner.pipeline_parallel.summary import stages_summary
from tests.runner.tiny_models import llama_config, random_model


def test_stages_are_as_large_as_what_they_hold() -> None:
    config = llama_config(num_hidden_layers=4, tie_word_embeddings=True)
    found = stages_summary(random_model(config), 3, 4)
    assert [(stage.first_layer, stage.end_layer) for stage in found] == [(0, 1), (1, 3), (3, 4)]
    assert [stage.sent_bytes_per_token for stage in found] == [32 * 4, 32 * 4, 8]
    for index, summary in enumerate(found):
        part: Any = random_model(config)
        StageCut(Stage(index=index, num_stages=3)).cut(part)
        assert summary.weight_bytes == sum(parameter.nbytes for parameter in part.parameters())
