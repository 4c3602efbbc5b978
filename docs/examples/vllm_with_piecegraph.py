"""vLLM with piecegraph as its compiler: vLLM schedules, attends, captures and samples; piecegraph compiles.

    python docs/examples/vllm_with_piecegraph.py MODEL            vLLM's compile replaced by piecegraph
    python docs/examples/vllm_with_piecegraph.py MODEL --plain    vLLM as it is

`COMPILATION` is all that is needed, as `compilation_config` of `vllm.LLM` or as `vllm serve --compilation-config`;
docs/other_runners.md explains each setting. `docs/examples/compare_runs.py` runs both and compares them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from compare_runs import add_arguments, report
from torch import fx

# vLLM loads a backend's result from files of its own unless told otherwise, and can store only its own backend's.
os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")

COMPILATION: dict[str, Any] = {
    "mode": 2,  # DYNAMO_TRACE_ONCE: one trace, which a backend by name compiles
    "backend": "piecegraph",
    "custom_ops": ["none"],  # norms and activations as torch code, which a compiler can fuse
    "cudagraph_mode": "FULL_DECODE_ONLY",  # vLLM captures; its PIECEWISE belongs to its own compiler
}
NATIVE_NORMS = {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}  # as vLLM's own Inductor has them


def eager_pieces(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
    """The same backend with options, which vLLM passes to none: name a function of your own as the backend."""
    from piecegraph.compiler.backend import compile_backend

    return compile_backend(gm, inputs, options={"compiler": "eager", "passes": ()})


def engine_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.LLM` that make the difference between the runs."""
    if arguments.plain and not arguments.exact:
        return {}
    compilation = dict(COMPILATION)
    if arguments.exact:  # neither side changes a bit: vLLM runs its torch code, piecegraph the same code in pieces
        compilation |= {"mode": 0} if arguments.plain else {"backend": "vllm_with_piecegraph.eager_pieces"}
    return {"compilation_config": compilation, "ir_op_priority": NATIVE_NORMS}


def main() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args()

    from vllm import LLM, SamplingParams

    llm = LLM(
        arguments.model,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=arguments.max_model_len,
        gpu_memory_utilization=arguments.memory,
        **engine_arguments(arguments),
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    report(arguments, generate, torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
