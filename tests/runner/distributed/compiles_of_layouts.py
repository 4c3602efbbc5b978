"""How many pieces the ranks of each layout compile from an empty cache, and at a second start.

`python -m tests.runner.distributed.compiles_of_layouts [LAYOUT ...]` prints a line for each start.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from piecegraph import LLM, SamplingParams
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.tiny_models import llama_config, make_model, random_model, save

PROMPTS = [[5, 17, 3], list(range(20, 44))]
LAYOUTS: Mapping[str, Mapping[str, object]] = {
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "TP 2 x PP 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "EP 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the ranks of one start have compiled."""

    num_keys: int  # unique pieces of all ranks, equal ones once
    num_held: int  # unique pieces of all ranks
    num_compiled: int  # by all ranks
    num_traced: int  # ranks that have traced the model, since no plan could be used

    def __str__(self) -> str:
        return (
            f"{self.num_held} pieces on all ranks, {self.num_keys} of them different, {self.num_compiled} compiled; "
            f"{self.num_traced} ranks traced"
        )


def model_of(layout: str) -> PreTrainedModel:
    """Return a tiny model: experts for "EP 2", else four equal layers, so that both of two stages have equal pieces."""
    return make_model("mixtral") if layout.startswith("EP") else random_model(llama_config(num_hidden_layers=4))


def start(folder: Path, model: PreTrainedModel, layout: str) -> Start:
    """Start the ranks with Inductor, check greedy tokens against transformers', and return what was compiled."""
    with LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        device="cpu",
        max_num_seqs=4,
        num_kv_blocks=48,
        compile_workers=0,
        distributed_timeout_seconds=240,
        **LAYOUTS[layout],  # type: ignore[arg-type]
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8)
        outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False)
        reports = llm.collective_rpc("report")
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_same_tokens(model, prompt, output.outputs[0].token_ids)
    keys = [key for report in reports for key in report["unique_pieces"]]
    compiled = sum(report["compiled_pieces"] for report in reports)
    traced = sum(report["cache"] != "hit" for report in reports)
    return Start(num_keys=len(set(keys)), num_held=len(keys), num_compiled=compiled, num_traced=traced)


def main() -> None:
    """Start each layout twice, with a cache of its own."""
    for layout in sys.argv[1:] or LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            os.environ.update(PIECEGRAPH_CACHE="on", PIECEGRAPH_CACHE_DIR=str(Path(folder, "cache")))
            model = model_of(layout)
            save(model, Path(folder, "model"))
            for when in ("empty cache", "second start"):
                sys.stdout.write(f"{layout}, {when}: {start(Path(folder, 'model'), model, layout)}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
