"""`PoolingEngine` forms batches of whole texts, and loses none after a failure."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from piecegraph.errors import RequestError, UsageError
from piecegraph.runner.pooling.engine import OutputRules, PoolingEngine
from piecegraph.runner.pooling.params import PoolingParams
from piecegraph.runner.pooling.step import Text
from piecegraph.runner.pooling.task import PoolingTask


class FakeRunner:
    """A runner whose rows are `[length, 1]`, and that fails when told to."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.fails = False
        self.resets = 0

    def execute_model(self, texts: Sequence[Text]) -> None:
        if self.fails:
            raise OSError("the device is gone")
        self.batches.append([len(text.token_ids) for text in texts])

    def pool(self) -> torch.Tensor:
        return torch.tensor([[float(n), 1.0] for n in self.batches[-1]])

    def reset(self) -> None:
        self.resets += 1


def make_engine(runner: FakeRunner, matryoshka: tuple[int, ...] | None = None) -> PoolingEngine:
    rules = OutputRules(task=PoolingTask.EMBED, size=2, normalize=False, matryoshka=matryoshka, activation=None)
    return PoolingEngine(
        runner=runner,  # type: ignore[arg-type]  # what the engine calls of it
        rules=rules,
        max_model_len=8,
        max_num_seqs=3,
        max_num_batched_tokens=10,
        vocab_size=16,
        num_token_types=2,
    )


def test_batches_keep_the_order_of_arrival_and_both_limits() -> None:
    """Within a batch texts are sorted by length, so that attention is called for equal ones at once."""
    runner = FakeRunner()
    engine = make_engine(runner)
    for name, length in zip("abcdef", (5, 2, 4, 1, 1, 1), strict=True):
        engine.add_request(name, Text(token_ids=[1] * length))
    found = {}
    while engine.has_unfinished:
        found.update({one.request_id: one.outputs.data.tolist() for one in engine.step()})
    assert runner.batches == [[2, 5], [1, 1, 4], [1]]
    assert found == {name: [n, 1.0] for name, n in zip("abcdef", (5.0, 2.0, 4.0, 1.0, 1.0, 1.0), strict=True)}
    assert engine.step() == []


def test_a_failed_step_keeps_its_texts() -> None:
    runner = FakeRunner()
    engine = make_engine(runner)
    engine.add_request("a", Text(token_ids=[1, 2]))
    runner.fails = True
    with pytest.raises(OSError, match="the device is gone"):
        engine.step()
    assert ("a" in engine, runner.resets) == (True, 1)
    runner.fails = False
    assert [one.request_id for one in engine.step()] == ["a"]


def test_ids_and_aborts() -> None:
    engine = make_engine(FakeRunner())
    engine.add_request("0", Text(token_ids=[1]))
    assert engine.new_ids(2) == ["1", "2"]
    with pytest.raises(UsageError, match="request '0' is queued already"):
        engine.add_request("0", Text(token_ids=[1]))
    engine.abort("0")
    engine.abort("never")
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (Text(token_ids=[]), "has no tokens"),
        (Text(token_ids=[1] * 9), "has 9 tokens, and the model takes at most 8"),
        (Text(token_ids=[16]), "token id 16 is not in the vocabulary"),
        (Text(token_ids=[1, 1], token_type_ids=[0]), "2 token ids, but 1 token_type_ids"),
        (Text(token_ids=[1], token_type_ids=[2]), "token_type_ids go from 0 to 1"),
    ],
)
def test_bad_texts_are_refused(text: Text, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_engine(FakeRunner()).add_request("a", text)


def test_dimensions_of_any_matryoshka_model() -> None:
    engine = make_engine(FakeRunner(), matryoshka=())
    engine.add_request("a", Text(token_ids=[1]), PoolingParams(dimensions=1))
    assert engine.step()[0].outputs.data.tolist() == [1.0]
    with pytest.raises(RequestError, match="dimensions=3, but the model's embeddings have 2"):
        engine.add_request("b", Text(token_ids=[1]), PoolingParams(dimensions=3))
