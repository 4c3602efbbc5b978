"""An outbox knows whether its caller has news to get, and what has been delivered."""

from __future__ import annotations

from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.output.outbox import Outbox, PendingOutput
from piecegraph.runner.output.output_processor import OutputProcessor
from piecegraph.runner.output.prompt_state import Delivered
from piecegraph.runner.scheduling.request import Request


def test_a_ready_output_counts_as_delivered_once_handed_over() -> None:
    """An output that is ready counts as delivered, so that nothing is made of the same news twice."""
    request = Request(
        request_id="0",
        prompt_token_ids=[1],
        sampling_params=SamplingParams(),
        seed=0,
        max_total_tokens=9,
        arrival=0,
    )
    outbox = Outbox()
    processor = OutputProcessor(None, [])
    prompt = processor.prompt_state("0", None, [request], is_final_only=False, outbox=outbox)
    made = processor.output(prompt, prompt.delivered)
    assert made is not None and not outbox
    delivered = Delivered(((1, 1, False),), True)
    outbox.ready.append(PendingOutput(prompt, made.output, delivered))
    assert outbox
    assert (prompt.delivered, outbox.delivered(prompt)) == (Delivered(), delivered)
    assert outbox.hand_over() == [made.output]
    assert (prompt.delivered, outbox.delivered(prompt)) == (delivered, delivered)
    assert not outbox and outbox.hand_over() == []
