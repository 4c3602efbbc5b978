"""A verification is one graph and one copy, as a step without drafts is."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecegraph import SamplingParams
from tests.runner.speculative.drafting_llm import NUM_DRAFTS, drafting
from tests.runner.step_counts import counted


@pytest.mark.parametrize("is_ahead", [False, True], ids=["each step awaited", "a step ahead"])
def test_a_verification_is_one_graph_and_one_copy(llama_dir: Path, is_ahead: bool) -> None:
    """Drafts are made, verified and recorded inside of the graph; of the host's comes the batch, if it changes."""
    params = SamplingParams(
        temperature=0.0, max_tokens=60, ignore_eos=True, logit_bias=None, detokenize=False, min_p=0.0
    )
    options = {"block_size": 16, "max_model_len": 96}
    with drafting(llama_dir, async_scheduling=is_ahead, **options) as llm:
        engine = llm.engine
        for i in range(2):
            engine.add_request(str(i), [4 + i] * 17, params, is_final_only=True)
        for _ in range(4):
            engine.step()
        num_verifications, num_uniform = 0, 0
        while engine.has_unfinished and num_uniform < 5:
            before = engine.stats.speculation
            with counted() as counts:
                engine.step()
            after = engine.stats.speculation
            assert before is not None and after is not None
            num_verifications += after.num_verifications - before.num_verifications
            if counts.staged_writes or counts.graphs != 1:
                continue  # a block was added, or the last step in flight was waited for
            num_uniform += 1
            # The tokens; and the batch itself after a step in which the host knew of no drafts.
            assert counts.writes == {"aten.copy_.default": 1} or (
                not is_ahead and counts.writes == {"aten.copy_.default": 2}
            )
            assert counts.host_bytes == 0
            assert not counts.allocations
        assert num_uniform == 5
        rows = llm.runner.counters.rows()
        assert any(row.mode.value == "FULL" and row.num_tokens == 2 * (1 + NUM_DRAFTS) for row in rows)
        for i in range(2):
            engine.abort(str(i))
        engine.step()
