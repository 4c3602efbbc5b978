"""A model of its own code that calls torch's attention runs by our op; what such a call passes besides is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from piecegraph.errors import UnsupportedModel
from tests.runner.test_hybrid_models import PROMPTS, load_hybrid


class OwnConfig(PreTrainedConfig):
    model_type = "own_attention"

    def __init__(self, call: str = "causal", **kwargs: Any) -> None:
        self.call = call
        self.vocab_size, self.hidden_size, self.num_hidden_layers = 128, 32, 2
        self.num_attention_heads, self.num_key_value_heads, self.max_position_embeddings = 4, 2, 96
        super().__init__(**kwargs)


class OwnAttention(nn.Module):
    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.call, self.num_heads, self.num_kv_heads = config.call, 4, 2
        self.qkv, self.out = nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).view(x.shape[0], x.shape[1], 8, 8).transpose(1, 2)
        query, key, value = qkv.split([4, 2, 2], dim=1)
        if self.call == "few heads":
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        elif self.call == "scaled":
            key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
            out = F.scaled_dot_product_attention(query, key, value, None, 0.0, True, scale=0.7)
        elif self.call == "masked":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        elif self.call == "both ways":
            out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        elif self.call == "more keys":
            key, value = (torch.cat([each[:, :, :1], each], dim=2) for each in (key, value))
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        elif self.call == "several":
            out = F.scaled_dot_product_attention(query, key, value, is_causal=bool(x.shape[1] > 1), enable_gqa=True)
        elif self.call == "dropout":
            out = F.scaled_dot_product_attention(query, key, value, None, 0.1, is_causal=True, enable_gqa=True)
        else:
            query, key, value = (each[0, :2] for each in (query, key, value))
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True).repeat(1, 2, 1, 1)
        return self.out(out.transpose(1, 2).flatten(2))


class OwnForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.embed, self.positions = nn.Embedding(128, 32), nn.Embedding(96, 32)
        self.layers = nn.ModuleList(nn.ModuleDict({"attention": OwnAttention(config)}) for _ in range(2))
        self.head = nn.Linear(32, 128)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: object,
    ) -> CausalLMOutputWithPast:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        hidden = self.embed(input_ids) + self.positions(position_ids)
        layer: Any
        for layer in self.layers:
            hidden = hidden + layer["attention"](hidden)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.head(hidden[:, kept]))


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    AutoConfig.register("own_attention", OwnConfig)
    AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
    yield
    del CONFIG_MAPPING._extra_content["own_attention"], MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[OwnConfig]


def saved(call: str, folder: Path) -> OwnForCausalLM:
    torch.manual_seed(0)
    model = OwnForCausalLM(OwnConfig(call))
    model.eval()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(str(folder))
    return model


@pytest.mark.parametrize(
    "call", ["few heads", *[pytest.param(c, marks=pytest.mark.slow) for c in ("scaled", "three dims")]]
)
def test_a_causal_call_is_lifted(call: str, tmp_path: Path) -> None:
    """In chunks, preempted, and with cached prefixes: greedy tokens are those of the model's own code."""
    from piecegraph import SamplingParams

    model = saved(call, tmp_path)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with load_hybrid(tmp_path, num_kv_blocks=11, max_model_len=44) as llm, torch.no_grad():
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                tokens = list(output.outputs[0].token_ids)
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
                best = logits.max(-1).values - logits[range(len(tokens)), tokens]
                assert float(best.max()) < 1e-4, (tokens, logits.argmax(-1).tolist())
        assert llm.engine.stats.num_preemptions > 0 and llm.engine.stats.num_prefix_hits > 0


@pytest.mark.parametrize(
    ("call", "met"),
    [
        ("masked", "passes an attention mask of its own"),
        ("both ways", "is not causal"),
        ("dropout", "applies dropout"),
        ("more keys", "passes 'keys of no token' to its attention"),
    ],
)
def test_a_call_that_is_not_plain_is_refused_by_what_it_passes(call: str, met: str, tmp_path: Path) -> None:
    saved(call, tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"layers\.0\.attention: {met}"):
        load_hybrid(tmp_path)


def test_a_module_that_asks_for_several_tokens_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    """And not by its first step of one token."""
    saved("several", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.attention .*u0 > 1"):
        load_hybrid(tmp_path)
