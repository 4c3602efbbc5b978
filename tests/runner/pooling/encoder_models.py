"""Tiny random models that pool, with a tokenizer that joins pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from tests.runner.architectures import shrunk

WORDS = "the a cat dog runs over lazy fox quick brown of near far and or not red blue green".split()
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCAB_SIZE = 64
MAX_LEN = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_DECODER = {**_COMMON, "num_key_value_heads": 2, "head_dim": 8}
_MODERN = {**_COMMON, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3}


def _tiny(model_type: str, **options: Any) -> Callable[[], PreTrainedConfig]:
    """A config of three layers by the names of its fields."""
    config_class: type[PreTrainedConfig] = type(AutoConfig.for_model(model_type))
    layers = config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    sizes = {"vocab_size": VOCAB_SIZE, layers: 3, "pad_token_id": None if model_type not in ENCODERS else 0}
    return lambda: config_class(**shrunk(config_class, {**sizes, **options}))


ENCODERS = ("roformer", "megatron-bert", "rembert")

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "bert": lambda: transformers.BertConfig(**_COMMON),
    "roberta": lambda: transformers.RobertaConfig(**{**_COMMON, "pad_token_id": 1}),
    "electra": lambda: transformers.ElectraConfig(**_COMMON, embedding_size=16),
    "albert": lambda: transformers.AlbertConfig(**_COMMON, embedding_size=16),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=VOCAB_SIZE, dim=32, hidden_dim=48, n_layers=3, n_heads=4, max_position_embeddings=MAX_LEN
    ),
    "modernbert-mean": lambda: transformers.ModernBertConfig(**_MODERN, classifier_pooling="mean"),
    "modernbert-cls": lambda: transformers.ModernBertConfig(**_MODERN, classifier_pooling="cls"),
    "llama": lambda: transformers.LlamaConfig(**{**_DECODER, "pad_token_id": None}),
    "qwen3": lambda: transformers.Qwen3Config(**_DECODER),
    "mistral-window": lambda: transformers.MistralConfig(**_DECODER, sliding_window=8),
    "roformer": _tiny("roformer"),
    "megatron-bert": _tiny("megatron-bert"),
    "rembert": _tiny("rembert", input_embedding_size=16),
    "gptj": _tiny("gptj"),
    "gpt_neo": _tiny("gpt_neo", attention_types=[[["global", "local", "global"], 1]]),
    "openai-gpt": _tiny("openai-gpt"),
    "falcon": _tiny("falcon"),
    "bloom": _tiny("bloom"),
    "mpt": _tiny("mpt"),
    "gemma3-bidirectional": lambda: transformers.Gemma3TextConfig(
        **_DECODER, sliding_window=8, use_bidirectional_attention=True
    ),
}

DECODERS = ("llama", "qwen3", "mistral-window", "gptj", "gpt_neo", "openai-gpt", "falcon", "bloom", "mpt")
"""The last six, and the encoders from RoFormer on, compute attention in modules of their own."""


def pair_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words, with `[CLS] a [SEP] b [SEP]` and token types as BERT's."""
    vocab = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def texts(count: int, seed: int = 0) -> list[str]:
    """Return texts of 1 to 40 words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 41, (count,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (n,), generator=generator)) for n in lengths]


def save_model(config: PreTrainedConfig, folder: Path, *, num_labels: int | None = None, seed: int = 0) -> Any:
    """Make a random model, a classifier if it has labels, save it with its tokenizer, and return it in float32."""
    auto: Any = AutoModel if num_labels is None else AutoModelForSequenceClassification
    if num_labels is not None:
        config.num_labels = num_labels
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = auto.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    pair_tokenizer().save_pretrained(str(folder))
    return model


def hidden_states(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Return transformers' hidden states of one text, `[num_tokens, hidden_size]`."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([list(token_ids)])).last_hidden_state[0]
    return found


def logits(model: Any, tokenized: Any) -> torch.Tensor:
    """Return transformers' logits of one text, or one pair, as its tokenizer gives it."""
    with torch.no_grad():
        found: torch.Tensor = model(**{name: torch.tensor([values]) for name, values in tokenized.items()}).logits[0]
    return found
