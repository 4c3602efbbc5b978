"""nano-vllm with its model compiled by `piecegraph.compile`: its engine, attention, CUDA graphs and sampler are kept.

    python docs/examples/nano_vllm_with_piecegraph.py MODEL            (PYTHONPATH has a checkout of nano-vllm)
    python docs/examples/nano_vllm_with_piecegraph.py MODEL --plain    nano-vllm as it is

Two things are needed, each a function below. Attention becomes an op, so that the model is one graph, cut at attention:
`attention_as_op`. The compiled model takes the place of the model before the runner warms up, so that the runner
captures it in its own CUDA graphs: `compile_model`. docs/other_runners.md says more.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from compare_runs import add_arguments, report
from nanovllm import LLM, SamplingParams
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import Attention
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding

import piecegraph as pg

_layers: dict[str, Attention] = {}  # by the name that the op gets: a piece passes tensors and constants, no modules
_nano_forward = Attention.forward
_library = torch.library.Library("nanovllm", "DEF")
_library.define("attention(Tensor query, Tensor key, Tensor value, str layer) -> Tensor")


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: str) -> torch.Tensor:
    result: torch.Tensor = _nano_forward(_layers[layer], query, key, value)
    return result.view(query.shape)


_library.impl("attention", _attention, "CompositeExplicitAutograd")
_library.impl("attention", lambda query, key, value, layer: query.new_empty(query.shape), "Meta")


def attention_as_op(model: torch.nn.Module) -> None:
    """Have each attention layer of `model` call the op by its name; the op calls nano-vllm's own forward."""
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            _layers[name] = module
            module.piecegraph_name = name
    Attention.forward = _forward


def _forward(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.nanovllm.attention.default(query, key, value, self.piecegraph_name)
    return result


@contextmanager
def defaults_of_a_step() -> Iterator[None]:
    """Set torch's defaults to those of a step, the caller's, which the runner changes while it starts.

    What piecegraph compiles under one default dtype refuses to run under another.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)


def compile_model(runner: ModelRunner, config: pg.CompileConfig) -> None:
    """Replace the forward of the runner's model, which computes hidden states; the runner calls it as before."""
    attention_as_op(runner.model)
    example = torch.zeros(16, dtype=torch.int64, device=next(runner.model.parameters()).device)
    with defaults_of_a_step():
        compiled = pg.compile(
            runner.model.model.requires_grad_(False),
            config,
            dynamic_dims={"input_ids": {0: "num_tokens"}, "positions": {0: "num_tokens"}},
            example_inputs=(example, example.clone()),
        )

    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with defaults_of_a_step():
            hidden_states: torch.Tensor = compiled(input_ids, positions)
        return hidden_states

    runner.model.forward = forward


def use_piecegraph(*, exact: bool = False) -> None:
    """Have every `ModelRunner` made from now on compile its model just before it warms it up."""
    warmup = ModelRunner.warmup_model
    options: dict[str, Any] = {"compiler": "eager", "passes": ()} if exact else {}
    config = pg.CompileConfig(split_ops=("nanovllm::attention",), **options)

    def compile_and_warm_up(runner: ModelRunner) -> None:
        compile_model(runner, config)
        warmup(runner)

    ModelRunner.warmup_model = compile_and_warm_up


def run_as_written() -> None:
    """Take nano-vllm's `torch.compile` off the parts of its model, so that they round as torch's own kernels do."""
    for part, name in (
        (RMSNorm, "rms_forward"),
        (RMSNorm, "add_rms_forward"),
        (RotaryEmbedding, "forward"),
        (SiluAndMul, "forward"),
    ):
        setattr(part, name, getattr(part, name)._torchdynamo_orig_callable)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.exact:
        run_as_written()
    if not arguments.plain:
        use_piecegraph(exact=arguments.exact)
    llm = LLM(arguments.model, max_model_len=arguments.max_model_len, gpu_memory_utilization=arguments.memory)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        torch.manual_seed(0)  # nano-vllm refuses temperature 0; at 1e-5 it draws the likeliest token, or one of equals
        sampling = SamplingParams(temperature=1e-5, ignore_eos=True, max_tokens=max_tokens)
        return [output["token_ids"] for output in llm.generate(prompts, sampling, use_tqdm=False)]

    report(arguments, generate, torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
