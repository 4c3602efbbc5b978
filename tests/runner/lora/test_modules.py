"""Linears and embeddings get stacks of matrices; a slot is written whole, whatever lay in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config

from piecegraph.errors import ConfigError
from piecegraph.runner.lora.modules import AdaptedModules, LoraOptions, adapt_modules
from tests.runner.tiny_models import make_model, random_model

Q, EMBED = "model.layers.0.self_attn.q_proj", "model.embed_tokens"


def adapted(targets: tuple[str, ...] | None = None) -> tuple[Any, AdaptedModules]:
    model = make_model("llama")
    options = LoraOptions(num_slots=2, max_rank=4, target_modules=targets)
    return model, adapt_modules(model, options, dtype=torch.float32, device=torch.device("cpu"))


def test_every_linear_and_embedding_is_adapted_and_no_checkpoint_has_the_stacks() -> None:
    model, modules = adapted()
    assert len(modules.modules) == 2 * 7 + 2
    assert not [name for name in model.state_dict() if "lora" in name]
    assert model.get_submodule(Q).lora_a.shape == (2, 4, 32)
    assert model.get_submodule(EMBED).lora_a.shape == (2, 128, 4)
    assert [path for path, shape in modules.shapes.items() if shape.is_output] == ["lm_head"]
    ids = torch.tensor([[3, 5, 9]])
    assert torch.equal(model(ids).logits, make_model("llama")(ids).logits)


def test_only_the_named_ones_are_adapted() -> None:
    _, modules = adapted(("q_proj", "lm_head"))
    assert [*modules.modules] == [Q, Q.replace("0", "1"), "lm_head"]
    with pytest.raises(ConfigError, match="lora_target_modules has 'q_porj', and LlamaForCausalLM has no"):
        adapted(("q_porj",))


def test_modules_of_other_classes_are_known_by_name() -> None:
    """GPT-2's projections are transformers' Conv1D, whose weights lie the other way round."""
    model = random_model(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=32))
    options = LoraOptions(num_slots=1, max_rank=4)
    modules = adapt_modules(model, options, dtype=torch.float32, device=torch.device("cpu"))
    assert modules.other_classes["transformer.h.0.attn.c_attn"] == "Conv1D"
    assert not set(modules.other_classes) & set(modules.modules)


def test_a_slot_is_written_whole() -> None:
    model, modules = adapted()
    q, embed = model.get_submodule(Q), model.get_submodule(EMBED)
    modules.write(1, {Q: (torch.ones(3, 32), torch.ones(32, 3)), EMBED: (torch.ones(2, 128), torch.ones(32, 2))})
    assert q.lora_ranks.tolist() == [0, 3] and embed.lora_ranks.tolist() == [0, 2]
    assert float(q.lora_a[1].sum()) == 3 * 32 and float(embed.lora_a[1].sum()) == 2 * 128
    assert float(q.lora_a[0].abs().sum()) == float(q.lora_b[0].abs().sum()) == 0
    modules.write(1, {EMBED: (torch.ones(1, 128), torch.ones(32, 1))})
    assert q.lora_ranks.tolist() == [0, 0] and embed.lora_ranks.tolist() == [0, 1]


def test_modules_that_no_piece_reads_are_left_out_and_named() -> None:
    model, modules = adapted(("q_proj", "lm_head"))
    read = modules.only_read({id(model.lm_head.lora_b), id(model.get_submodule(Q).lora_b)})
    assert [*read.modules] == [*read.shapes] == [Q, "lm_head"] and read.unread == (Q.replace("0", "1"),)
    assert "1 modules, such as model.layers.1.self_attn.q_proj, in ways of its own" in read.notes[1]
