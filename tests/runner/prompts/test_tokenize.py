"""A prompt is text, tokens or embeddings, in any of vLLM's forms; anything else is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from piecegraph.errors import RequestError
from piecegraph.runner.prompts.tokenize import TokenizedPrompt, prompt_sequence, tokenize
from tests.runner.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def test_text_and_tokens_become_token_ids() -> None:
    """The caller's list is copied: changing it later changes nothing."""
    ids = TOKENIZER("the end")["input_ids"]
    assert tokenize("the end", TOKENIZER) == TokenizedPrompt("the end", ids)
    assert tokenize({"prompt": "the end", "prompt_token_ids": None}, TOKENIZER) == TokenizedPrompt("the end", ids)
    assert tokenize({"prompt": "the end", "cache_salt": "a"}, TOKENIZER) == TokenizedPrompt("the end", ids, "a")
    given = [5, 6]
    prompt = tokenize({"prompt_token_ids": given, "prompt": "its text", "cache_salt": "mine"}, None)
    given.append(7)
    assert prompt == TokenizedPrompt("its text", [5, 6], "mine")


@pytest.mark.parametrize(
    "ids",
    [[5, 6], (5, 6), np.array([5, 6]), torch.tensor([5, 6]), [np.int32(5), torch.tensor(6)]],
    ids=["list", "tuple", "numpy", "tensor", "mixed"],
)
def test_token_ids_may_be_lists_arrays_or_tensors(ids: Any) -> None:
    """As the prompt itself, and by name; always plain integers."""
    for prompt in (ids, {"prompt_token_ids": ids}):
        (one,) = prompt_sequence(prompt)
        found = tokenize(one, None)
        assert found == TokenizedPrompt(None, [5, 6])
        assert [type(token) for token in found.token_ids] == [int, int]


@pytest.mark.parametrize(
    ("prompts", "number"),
    [
        ("text", 1),
        ({"prompt": "text"}, 1),
        ([1, 2, 3], 1),
        (torch.tensor([1, 2]), 1),
        (["a", [1, 2], {"prompt": "b"}], 3),
        ([[1, 2], [3]], 2),
        (([1, 2], "a"), 2),
        (np.array([[1, 2], [3, 4], [5, 6]]), 3),
        ([np.array([1]), torch.tensor([2, 3])], 2),
        ((text for text in ("a", "b")), 2),
        ([], 0),
    ],
)
def test_one_prompt_and_several_are_accepted(prompts: Any, number: int) -> None:
    found = prompt_sequence(prompts)
    assert len(found) == number
    for prompt in found:
        assert tokenize(prompt, TOKENIZER).token_ids


def test_tokenization_kwargs_reach_the_tokenizer() -> None:
    """They are the caller's, and what the tokenizer does not take is refused."""
    assert len(tokenize("abcdef", TOKENIZER, {"truncation": True, "max_length": 4}).token_ids) == 4
    with pytest.raises(RequestError, match="tokenization_kwargs has 'return_tensors'"):
        tokenize("a", TOKENIZER, {"return_tensors": "pt"})
    with pytest.raises(RequestError, match="tokenization_kwargs=.*return_overflowing_tokens.*one list of token ids"):
        tokenize("abc", TOKENIZER, {"return_overflowing_tokens": True})


def test_embeddings_are_copied_and_have_a_cache_salt_of_their_own() -> None:
    """They have tokens that mean nothing, and share cached prefixes with equal embeddings alone."""
    embeds = torch.randn(3, 4)
    one, same, other = (tokenize({"prompt_embeds": e}, None) for e in (embeds, embeds.clone()[None], embeds + 1))
    assert one.token_ids == [0, 0, 0] and one.embeds is not None
    assert torch.equal(one.embeds, embeds)
    embeds.zero_()
    assert not torch.equal(one.embeds, embeds)
    assert one.cache_salt == same.cache_salt != other.cache_salt
    salted = tokenize({"prompt_embeds": other.embeds, "cache_salt": "mine"}, None)
    assert salted.cache_salt != other.cache_salt


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": [5], "cache_salts": "x"}, "takes no 'cache_salts'. Did you mean 'cache_salt'"),
        (
            {"prompt": "x", "multi_modal_data": {"image": 1}},
            "'multi_modal_data', which is not available here",
        ),
        (
            {"prompt": "x", "encoder_prompt": "y"},
            "'encoder_prompt', which is not available here",
        ),
        ({"prompt_token_ids": "5 6"}, "prompt_token_ids='5 6'; it must be a list of token ids"),
        ({"prompt_token_ids": [5], "prompt": 7}, "prompt=7; it must be a string"),
        ({"prompt_token_ids": [5], "cache_salt": 7}, "cache_salt=7; it must be a string"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids has token id True"),
        ([1.0], r"prompt has token id 1\.0"),
        ({"prompt_token_ids": torch.tensor([[5]])}, "shape"),
        ({}, r"not a mapping with \[\]"),
        (b"text", "a prompt is a string, .*, not b'text'"),
        (7, "a prompt is a string, .*, not 7"),
        ({"prompt_embeds": [[1.0]]}, "prompt_embeds is of type list; it must be a tensor"),
        ({"prompt_embeds": torch.zeros(3)}, r"a tensor \[3\] of torch.float32; it must be \[num_tokens, hidden_size\]"),
        ({"prompt_embeds": torch.zeros(3, 4).long()}, "of float16, bfloat16, float32 or float64"),
        ({"prompt_embeds": torch.zeros(3, 4).to(torch.float8_e4m3fn)}, "of torch.float8_e4m3fn; it must be"),
        ({"prompt_embeds": torch.zeros(3, 4, device="meta")}, "prompt_embeds is on the meta device"),
        ({"prompt_embeds": torch.zeros(3, 4).to_sparse()}, "prompt_embeds is torch.sparse_coo; it must be a dense"),
        ({"prompt_embeds": torch.zeros(1, 3, 4).to_sparse()}, "prompt_embeds is torch.sparse_coo; it must be a dense"),
        ({"prompt_embeds": torch.zeros(1, 4), "prompt_token_ids": [1]}, "give one of them"),
    ],
)
def test_an_invalid_prompt_is_refused(prompt: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tokenize(prompt, TOKENIZER)


def test_invalid_prompts_are_refused() -> None:
    with pytest.raises(RequestError, match="prompts=None; a prompt is a string"):
        prompt_sequence(None)
    with pytest.raises(RequestError, match=r"prompts=tensor\(3\), an array without a dimension"):
        prompt_sequence(torch.tensor(3))
