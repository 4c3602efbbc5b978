from __future__ import annotations

import torch

from piecegraph.runner.step.state.request_states import RequestStates


def test_tokens_of_another_process_are_written_before_the_next_step_reads_them() -> None:
    """A token behind a row's end is not kept; the row of a request that has ended is its successor's."""
    states = RequestStates(max_num_reqs=2, max_model_len=6, max_blocks=1, device=torch.device("cpu"))
    first, second = states.add("first", [1, 2], [[0]]), states.add("second", [3, 4, 5, 6, 7, 8], [[1]])
    states.apply_writes()
    states.record_tokens({(first, 2): 9, (second, 6): 10})
    assert states.token_ids[first].tolist() == [1, 2, 0, 0, 0, 0]
    states.apply_writes()
    assert states.token_ids[first].tolist() == [1, 2, 9, 0, 0, 0]
    assert states.token_ids[second].tolist() == [3, 4, 5, 6, 7, 8]
    states.record_tokens({(first, 3): 11})
    states.remove("first")
    assert states.add("third", [12, 13, 14, 15], [[0]]) == first
    states.apply_writes()
    assert states.token_ids[first].tolist()[:4] == [12, 13, 14, 15]
