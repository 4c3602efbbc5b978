from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from piecegraph.runner.llm import LLM
from piecegraph.tools.bench.measure.ceilings import Ceilings
from piecegraph.tools.bench.measure.engines import Holder, from_engines, has_own_engine, measure_engines


def doubled(holder: Holder, number: int) -> int:
    return 2 * number + cast(Any, holder).extra


def test_an_engine_of_this_process_is_asked_without_a_call_to_ranks() -> None:
    """Under a launcher a rank's calls reach itself only, which need not be the first one. See also
    test_decode_batch.py, with several engines.
    """
    llm = cast(LLM, SimpleNamespace(engine=object(), extra=1))
    assert has_own_engine(llm)
    assert from_engines(llm, doubled, 3) == [7]


def test_rates_are_of_the_engines_device(monkeypatch: Any) -> None:
    found: list[tuple[torch.device, torch.dtype]] = []

    def measured(*what: Any) -> Ceilings:
        found.append(what)
        return Ceilings(read_bytes_per_s=2.0, flops_per_s=3.0)

    monkeypatch.setattr("piecegraph.tools.bench.measure.engines.measure_ceilings", measured)
    ids = SimpleNamespace(device=torch.device("cpu"))
    runner = SimpleNamespace(step=SimpleNamespace(buffers=SimpleNamespace(input_ids=ids)))
    llm = SimpleNamespace(engine=object(), runner=runner, model_config=SimpleNamespace(dtype=torch.float32))
    assert measure_engines(cast(LLM, llm)) == Ceilings(read_bytes_per_s=2.0, flops_per_s=3.0)
    assert found == [(torch.device("cpu"), torch.float32)]
