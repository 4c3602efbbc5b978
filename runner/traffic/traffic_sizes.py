"""`cudagraph_capture_sizes="traffic"`: the sizes that cost least for what engines of the same model have run."""

from __future__ import annotations

from dataclasses import replace

from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.cudagraphs.capture_sizes import default_capture_sizes
from piecegraph.runner.traffic.kept import Kept
from piecegraph.runner.traffic.pick_sizes import Histogram, cost_model, pick_sizes


def histogram_of(kept: Kept, *, max_num_seqs: int, max_num_tokens: int) -> Histogram:
    """Return what was counted, for an engine with these limits."""
    return Histogram(decode=kept.decode, mixed=kept.mixed, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens)


def with_traffic_sizes(config: EngineConfig, kept: Kept, max_num_tokens: int) -> tuple[EngineConfig, tuple[str, ...]]:
    """Return the config with sizes to capture in the place of "traffic", and what to tell about them.

    There are as many as in the default ladder, at most. Without history the default ladder stays.
    """
    if not config.sizes_from_traffic:
        return config, ()
    if config.num_ranks > 1 or config.speculative is not None:
        what = "several ranks" if config.num_ranks > 1 else "speculative_config"
        return config, (f"cudagraph_capture_sizes='traffic' is not available with {what}; the default sizes are used",)
    histogram = histogram_of(kept, max_num_seqs=config.max_num_seqs, max_num_tokens=max_num_tokens)
    if not histogram.num_steps:
        return config, (
            "cudagraph_capture_sizes='traffic': no steps of this model are known; the default sizes are used",
        )
    model = cost_model(kept.times)
    sizes = pick_sizes(histogram, count=len(default_capture_sizes(max_num_tokens)), model=model)
    by = "measured times" if model.is_measured else "the number of tokens, because no times were measured"
    note = f"cudagraph_capture_sizes='traffic': {len(sizes)} sizes for {histogram.num_steps} steps, by {by}"
    return replace(config, cudagraph_capture_sizes=sizes, sizes_from_traffic=False), (note,)
