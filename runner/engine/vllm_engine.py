"""`LLMEngine`, which wraps an `LLM`'s engine in the interface of vLLM's class, for scripts with their own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from piecegraph.errors import UsageError
from piecegraph.runner.common.outputs import RequestOutput
from piecegraph.runner.common.sampling_params import SamplingParams
from piecegraph.runner.engine.metrics import Metric, engine_metrics
from piecegraph.runner.lora.request import LoRARequest, per_prompt_loras
from piecegraph.runner.prompts.tokenize import Prompt, tokenize

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from piecegraph.runner.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The configuration of the model that runs, under vLLM's names."""

    model: str  # a folder, a .gguf file or a hub id
    hf_config: PretrainedConfig
    dtype: torch.dtype
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int
    seed: int

    def get_vocab_size(self) -> int:
        """Return the number of tokens in the vocabulary."""
        return self.vocab_size

    def get_hidden_size(self) -> int:
        """Return the size of the model's hidden states."""
        size: int = self.hf_config.get_text_config(decoder=True).hidden_size
        return size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LLMEngine:
    """A stateless wrapper of `Engine` with vLLM's names, which accepts prompts in every form."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase | None
    model_config: ModelConfig
    default_sampling_params: Callable[[], SamplingParams]

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt and return its id; prompts with a lower `priority` are scheduled first.

        `arrival_time` and `trace_headers` have no effect. Raises `RequestError`, without any change, if the prompt
        can never run.
        """
        (adapter,) = per_prompt_loras([lora_request], 1)
        tokenized = tokenize(prompt, self.tokenizer, tokenization_kwargs)
        self.engine.add_request(
            request_id,
            tokenized.token_ids,
            params if params is not None else self.default_sampling_params(),
            prompt=tokenized.text,
            priority=priority,
            cache_salt=tokenized.cache_salt,
            prompt_embeds=tokenized.embeds,
            lora_request=adapter,
        )
        return request_id

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter unless it is loaded, and return True. Raises what `AdapterStore.add` raises."""
        self.engine.adapters.add(lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Drop an adapter and return whether it was loaded. Requests that run with it go on."""
        return self.engine.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """Return the numbers of the loaded adapters."""
        return set(self.engine.adapters.loaded())

    def pin_lora(self, lora_id: int) -> bool:
        """Keep a loaded adapter until it is removed; return whether it is loaded."""
        return self.engine.adapters.pin(lora_id)

    def step(self) -> list[RequestOutput]:
        """Run one step and return the outputs of the prompts that received a token."""
        return self.engine.step()

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End these prompts now; ids of prompts that are not running are ignored."""
        for request_id in (request_ids,) if isinstance(request_ids, str) else tuple(request_ids):
            self.engine.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has anything to compute or to return."""
        return self.engine.has_unfinished

    def get_num_unfinished_requests(self) -> int:
        """Return the number of completions that run or wait."""
        return self.engine.num_unfinished

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer. Raises `UsageError` if there is none."""
        if self.tokenizer is None:
            raise UsageError("there is no tokenizer (skip_tokenizer_init); make an LLM without skip_tokenizer_init.")
        return self.tokenizer

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Discard all cached prefixes, those of running requests included, which continue to run. Return True.

        `reset_running_requests` and `reset_connector` have no effect: running requests need no reset, and there is no
        connector.
        """
        self.engine.reset_prefix_cache()
        return True

    def get_metrics(self) -> list[Metric]:
        """Return counters since the start and current gauges, under vLLM's names."""
        return engine_metrics(self.engine.stats, self.engine.num_output_tokens, self.model_config.model)
