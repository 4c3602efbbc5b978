"""Processors are classes, given or named; an adapter binds a function to each request that wants one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piecegraph.errors import ConfigError
from piecegraph.runner.common.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessorConfig,
    MoveDirectionality,
    logits_processor_classes,
)
from piecegraph.runner.common.sampling_params import SamplingParams

CONFIG = LogitsProcessorConfig(
    model_config=LogitsProcessorConfig.Model(hf_config=None, max_model_len=8, vocab_size=1),
    scheduler_config=LogitsProcessorConfig.Scheduler(max_num_seqs=4, max_num_batched_tokens=8),
)


class Adds(AdapterLogitsProcessor):
    """Adds `extra_args["add"]` and the number of output tokens."""

    def is_argmax_invariant(self) -> bool:
        return True

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        add = (params.extra_args or {}).get("add")
        return None if add is None else lambda output, logits: logits + add + len(output)


def added(row: int, add: int | None) -> Any:
    return row, SamplingParams(extra_args=None if add is None else {"add": add}), [1], [2] * row


def test_an_adapter_follows_the_batch() -> None:
    """Rows are freed, taken over, moved and exchanged."""
    processor = Adds(CONFIG, torch.device("cpu"), False)

    def values(num: int) -> list[float]:
        return processor.apply(torch.zeros(num, 1)).flatten().tolist()

    processor.update_state(BatchUpdate(3, [], [added(0, 10), added(1, None), added(2, 30)], []))
    processor.update_state(None)
    assert values(3) == [10.0, 0.0, 32.0]
    processor.update_state(BatchUpdate(3, [], [], [(0, 2, MoveDirectionality.SWAP)]))
    assert values(3) == [32.0, 0.0, 10.0]
    processor.update_state(BatchUpdate(2, [0], [], [(2, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    assert values(2) == [10.0, 0.0]
    processor.update_state(BatchUpdate(2, [], [added(0, None), added(1, 5)], []))
    assert values(2) == [0.0, 6.0]


def test_classes_may_be_given_by_name() -> None:
    name = f"{__name__}:Adds"
    assert logits_processor_classes(None) == logits_processor_classes([]) == ()
    assert logits_processor_classes([Adds]) == (Adds,)
    assert [kind.__name__ for kind in logits_processor_classes([name])] == ["Adds"]


@pytest.mark.parametrize("given", ["os:path", Adds, 5, [int], ["os:path"], ["os"], ["no.such.module:X"], [len]])
def test_a_value_that_is_not_a_processor_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="^logits_processors"):
        logits_processor_classes(given)


def test_parameters_are_valid_by_default() -> None:
    LogitsProcessor.validate_params(SamplingParams())
