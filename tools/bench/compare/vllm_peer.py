"""vLLM as a peer, greedy, through its `LLM`, or through `AsyncLLM` where it has several engines.

The command is `python -m piecegraph.tools.bench.compare.vllm_peer {job}` in an environment that has vLLM; the options
are vLLM's own, by their names (`--help`). Names and behaviour are those of vLLM 0.26.0. Its processes import this file
again, which does nothing then. Variables of the environment that are not set are set for the run, `variables` says
which. With several GPUs `tpot_processor_ms` and `peak_rss_bytes` are those of the first process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from piecegraph import environment
from piecegraph.tools.bench.compare.workload import Generate, PeerJob, job_of, measure_job
from piecegraph.tools.bench.measure.offline_workload import make_workload


def parser() -> argparse.ArgumentParser:
    """Return the parser of the peer's arguments."""
    options = argparse.ArgumentParser(prog="vllm_peer", description="Measure vLLM for `piecegraph bench compare`.")
    options.add_argument("job", type=job_of, help="the workload: {job}")
    options.add_argument("--tensor-parallel-size", type=int, default=1)
    options.add_argument("--data-parallel-size", type=int, default=1)
    options.add_argument("--enable-expert-parallel", action="store_true")
    options.add_argument("--quantization", help="such as fp8, which rounds a plain model's weights")
    options.add_argument("--kv-cache-dtype", default="auto", help="such as fp8")
    options.add_argument("--speculative", type=json.loads, metavar="JSON", help="vLLM's speculative_config")
    options.add_argument("--hf-overrides", type=json.loads, metavar="JSON", help="such as a quantization_config")
    options.add_argument("--additional-config", type=json.loads, metavar="JSON", help="vLLM's additional_config")
    options.add_argument("--max-model-len", type=int, help="by default that of the longest request of the job")
    options.add_argument("--load-format", default="auto", help="dummy: random weights")
    options.add_argument("--gpu-memory-utilization", type=float, default=0.8)
    return options


def variables(num_gpus: int, num_engines: int) -> dict[str, str]:
    """Return the variables that vLLM is run with: its messages on stderr, and the engine in this process if it can be.

    Processes are spawned, since a fork of one that has threads can hang. Sums over GPUs leave NVLink's multicast alone,
    which hosts can lack (`engine_arguments`, too). Samplers are vLLM's own: FlashInfer's are compiled at the first use.
    """
    found = {
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout ends with the record
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if num_gpus > 1:
        found |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_USE_NCCL_SYMM_MEM": "0"}
    if num_engines == 1:
        found["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return found


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's engine: those of the options, with the limits that ours has."""
    job: PeerJob = options.job
    arguments = {
        "model": job.model,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,  # as ours: a workload that is run again may find nothing of the time before
        "max_model_len": options.max_model_len or job.longest,
        "max_num_seqs": job.most_requests,
        "load_format": options.load_format,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enable_expert_parallel": options.enable_expert_parallel,
        "kv_cache_dtype": options.kv_cache_dtype,
        "quantization": options.quantization,
        "speculative_config": options.speculative,
        "hf_overrides": options.hf_overrides or {},
    }
    if options.additional_config:
        arguments["additional_config"] = options.additional_config
    if options.tensor_parallel_size > 1:  # it tries NVLink's multicast first
        arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    if options.data_parallel_size > 1:
        arguments["data_parallel_size"] = options.data_parallel_size
    return arguments


class OneEngine:
    """vLLM's `LLM`, whose engine is in this process; its ranks are processes if there are several."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._llm: Any = importlib.import_module("vllm").LLM(**arguments)
        self.vocab_size = int(self._llm.model_config.get_vocab_size())

    def answers(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[list[int]]:
        """Return the tokens that answer each prompt."""
        outputs = self._llm.generate([{"prompt_token_ids": each} for each in prompts], list(params), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """End its processes."""
        self._llm.llm_engine.engine_core.shutdown()


class SeveralEngines:
    """vLLM's `AsyncLLM`, as its server has it: `LLM` refuses `data_parallel_size`. Requests go to the idlest engine."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self._engine: Any = self._loop.run_until_complete(self._start({**arguments, "disable_log_stats": True}))
        self.vocab_size = int(self._engine.model_config.get_vocab_size())

    async def _start(self, arguments: dict[str, Any]) -> Any:
        """Make it where the loop runs, on which its sockets depend."""
        made = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs(**arguments)
        return importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(made)

    def answers(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[list[int]]:
        """Return the tokens that answer each prompt."""
        return self._loop.run_until_complete(self._all(prompts, params))

    async def _all(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[list[int]]:
        pairs = zip(prompts, params, strict=True)
        return list(await asyncio.gather(*(self._one(prompt, each) for prompt, each in pairs)))

    async def _one(self, prompt: list[int], params: Any) -> list[int]:
        self._number += 1
        stream = self._engine.generate({"prompt_token_ids": prompt}, params, str(self._number))
        (output,) = [each async for each in stream]  # only the final one comes
        return list(output.outputs[0].token_ids)

    def close(self) -> None:
        """End its processes."""
        self._engine.shutdown()


def sampling(num_tokens: int, temperature: float) -> Any:
    """Return vLLM's parameters of a request that ends after `num_tokens` tokens, and is returned once, at its end."""
    module = importlib.import_module("vllm.sampling_params")
    return module.SamplingParams(
        temperature=temperature,
        ignore_eos=True,
        max_tokens=num_tokens,
        detokenize=False,
        output_kind=module.RequestOutputKind.FINAL_ONLY,
    )


def import_it() -> None:
    """Import vLLM. Raises `SystemExit` with what to do if it is missing."""
    try:
        importlib.import_module("vllm").LLM  # noqa: B018  its modules are imported when a name is used
    except ImportError as error:
        raise SystemExit(
            f"vllm is missing ({error}); name a Python that has it: --peer 'vllm=PYTHON -m "
            "piecegraph.tools.bench.compare.vllm_peer {job}', with this package's folder in PYTHONPATH."
        ) from error


def offline(engine: OneEngine | SeveralEngines, job: PeerJob) -> dict[str, float]:
    """Run nano-vllm's workload at temperature 0.6 as ours does, and return its figures."""
    low, high = job.offline_tokens
    work = make_workload(job.offline_requests, (low, high), (low, high), vocab_size=engine.vocab_size, seed=0)
    params = [sampling(num_tokens, 0.6) for num_tokens in work.output_lens]
    began = time.perf_counter()
    engine.answers(work.prompts, params)
    seconds = time.perf_counter() - began
    return {"offline_tok_s": sum(work.output_lens) / seconds, "offline_s": seconds}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of the job that the options name, and leave none of vLLM's processes, whatever is raised."""
    job: PeerJob = options.job
    made: list[OneEngine | SeveralEngines] = []

    def load() -> tuple[Generate, int]:
        engine = (OneEngine if options.data_parallel_size == 1 else SeveralEngines)(engine_arguments(options))
        made.append(engine)

        def generate(prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
            return engine.answers(prompts, [sampling(num_tokens, 0.0)] * len(prompts))

        return generate, engine.vocab_size

    try:
        record = measure_job(job, "vllm", import_it, load)
        if job.offline_requests:
            record |= offline(made[0], job)
        return record
    finally:
        for engine in made:
            engine.close()


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    num_engines = options.data_parallel_size
    with ExitStack() as stack:
        for name, value in variables(options.tensor_parallel_size * num_engines, num_engines).items():
            stack.enter_context(environment.set_by_default(name, value))
        record = measure(options)
    sys.stdout.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
