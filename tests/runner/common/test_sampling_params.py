"""A value out of range is refused with its field, the value and the range."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from piecegraph import SamplingParams
from piecegraph.errors import RequestError
from piecegraph.runner.common.sampling_params import FIELDS, WITHOUT_EFFECT, RequestOutputKind
from piecegraph.runner.common.vllm_interface import UNAVAILABLE_SAMPLING_PARAMS

BAD: list[tuple[dict[str, object], str]] = [
    ({"n": 0}, "n=0; it must be from 1 to 16384"),
    ({"n": 2, "temperature": 0.0}, "n=2; it must be 1 when temperature is 0"),
    ({"min_p": 1.5}, "min_p=1.5; it must be from 0 (off) to 1"),
    ({"min_p": -0.1}, "min_p=-0.1; it must be from 0 (off) to 1"),
    ({"presence_penalty": 2.1}, "presence_penalty=2.1; it must be from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty=-3; it must be from -2 to 2"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0; it must be above 0"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty=inf; it must be above 0"),
    ({"min_tokens": -1}, "min_tokens=-1; it must be 0 or more"),
    ({"min_tokens": 17}, "min_tokens=17; it must be at most max_tokens=16"),
    ({"logprobs": -2}, "logprobs=-2; it must be 0 or more, -1 (all tokens) or None"),
    ({"prompt_logprobs": 1.0}, "prompt_logprobs=1.0; it must be 0 or more"),
    ({"logprobs": False}, "logprobs=False; it must be 0 or more, -1 (all tokens) or None"),
    ({"flat_logprobs": 1}, "flat_logprobs=1; it must be True or False"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0; it must be 1 or more, -1 (what fits) or None"),
    ({"output_kind": 1}, "output_kind=1; it must be one of RequestOutputKind.CUMULATIVE"),
    ({"extra_args": [1]}, "extra_args=[1]; it must be a mapping with strings as keys"),
    ({"stop_token_ids": [True]}, "stop_token_ids has token id True; ids are whole numbers"),
    ({"stop_token_ids": 5}, "stop_token_ids=5; it must be a list of token ids"),
    ({"allowed_token_ids": [2, True]}, "allowed_token_ids has token id True"),
    ({"logit_bias": {True: 1.0}}, "logit_bias=True; it must be token ids"),
    ({"stop": 5}, "stop=5; it must be a string, or several"),
    ({"stop": [b"x"]}, "stop=b'x'; it must be a string, or several"),
    ({"bad_words": 5}, "bad_words=5; it must be strings"),
    ({"allowed_token_ids": []}, "allowed_token_ids=[]; it must hold a token id or more, or be None"),
    ({"allowed_token_ids": [3, -1]}, "allowed_token_ids=-1; it must be token ids, 0 or more"),
    ({"bad_words": "no"}, "bad_words='no'; it must be a list of strings: ['no']"),
    ({"bad_words": ["no", ""]}, "bad_words=''; it must be strings, none of them empty"),
    ({"logit_bias": [1, 2]}, "logit_bias=[1, 2]; it must be token ids with a number each"),
    ({"logit_bias": {-1: 2.0}}, "logit_bias=-1; it must be token ids, 0 or more"),
    ({"logit_bias": {"7": 2.0}}, "logit_bias='7'; it must be token ids"),
    ({"logit_bias": {7: float("nan")}}, "logit_bias[7]=nan; it must be a finite number"),
    ({"temperature": -0.1}, "temperature=-0.1; it must be a number, 0 (greedy) or more"),
    ({"temperature": float("nan")}, "temperature=nan; it must be"),
    ({"temperature": "hot"}, "temperature='hot'; it must be"),
    ({"top_p": 0.0}, "top_p=0.0; it must be above 0, at most 1"),
    ({"top_p": 1.5}, "top_p=1.5; it must be above 0, at most 1"),
    ({"top_k": -2}, "top_k=-2; it must be 1 or more, or 0 or -1 (off)"),
    ({"top_k": 1.5}, "top_k=1.5; it must be"),
    ({"seed": -1}, "seed=-1; it must be from 0 to 2**63 - 1, or None"),
    ({"max_tokens": -4}, "max_tokens=-4; it must be 1 or more, or None"),
    ({"max_tokens": 0}, "max_tokens=0; it must be 1 or more"),
    ({"max_tokens": True}, "max_tokens=True; it must be"),
    ({"stop": ["a", ""]}, "stop=''; it must be a string, or several, none of them empty"),
    ({"stop_token_ids": [-1]}, "stop_token_ids=-1; it must be token ids, 0 or more"),
    ({"ignore_eos": 1}, "ignore_eos=1; it must be True or False"),
    ({"stop": "x", "detokenize": False}, "stop strings are searched in the text, and detokenize=False makes no text"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_value(options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_unknown_names_and_unavailable_ones_are_distinguished() -> None:
    """A field of vLLM's that is missing is refused by name unless its value has no effect; a typo gets a suggestion."""
    makers: list[Any] = [SamplingParams, SamplingParams.from_options, SamplingParams.from_optional]
    for make in makers:
        with pytest.raises(RequestError, match="sampling parameter 'best_of' is not yet available"):
            make(best_of=2)
        with pytest.raises(RequestError, match=r"unknown sampling parameter 'temprature'\. Did you mean 'temperature'"):
            make(temprature=0.1)
        assert make(structured_outputs=None, skip_clone=True, spaces_between_special_tokens=True) == SamplingParams()
    with pytest.raises(AttributeError, match="temprature"):
        SamplingParams().temprature = 0.1


def test_every_field_of_vllm_is_ours_or_refused_by_name() -> None:
    assert set(UNAVAILABLE_SAMPLING_PARAMS) <= set(WITHOUT_EFFECT)
    assert not set(WITHOUT_EFFECT) & set(FIELDS)


@pytest.mark.parametrize(("options", "message"), [(options, message) for options, message in BAD if len(options) == 1])
def test_an_assignment_is_checked_as_the_constructor_does(options: dict[str, object], message: str) -> None:
    """A bad value is refused at once, unless that depends on other fields; the object then keeps its old value."""
    params = SamplingParams(temperature=1.0)
    ((name, value),) = options.items()
    if name == "min_tokens" and value == 17:
        params.min_tokens = 17
        with pytest.raises(RequestError, match=re.escape(message)):
            params.snapshot()
        return
    with pytest.raises(RequestError, match=re.escape(message)):
        setattr(params, name, value)
    assert params == SamplingParams(temperature=1.0)


def test_fields_may_contradict_each_other_between_two_assignments() -> None:
    params = SamplingParams(n=2, temperature=0.5, stop="x")
    params.temperature, params.detokenize = 0.0, False
    for message in ("stop strings are searched in the text", "n=2; it must be 1 when temperature is 0"):
        with pytest.raises(RequestError, match=message):
            params.snapshot()
        params.stop = None
    params.n = 1
    assert params.snapshot() == SamplingParams(temperature=0.0, detokenize=False)


def test_a_snapshot_does_not_change_with_its_original() -> None:
    """A snapshot cannot be assigned to, and later changes of the original or its values do not reach it; values that
    are invalid by then are refused."""
    nested = {"target": [1]}
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, stop_token_ids=[3], extra_args=nested)
    taken = params.snapshot()
    assert taken == params and taken.snapshot() is taken
    params.temperature = 0.0
    for values, value in ((params.stop, "b"), (params.stop_token_ids, 4), (nested["target"], 2)):
        values.append(value)  # type: ignore[union-attr]
    assert taken == SamplingParams(stop=["a"], logit_bias={1: 2.0}, stop_token_ids=[3], extra_args={"target": [1]})
    with pytest.raises(FrozenInstanceError, match="temperature of the parameters of a running request"):
        taken.temperature = 0.5
    changed = taken.clone()
    changed.temperature = 0.5
    assert (changed.temperature, taken.temperature) == (0.5, 1.0)
    params.stop_token_ids.append(-1)  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="stop_token_ids=-1"):
        params.snapshot()


def test_values_that_cannot_be_copied_are_refused() -> None:
    with pytest.raises(RequestError, match="extra_args=.* cannot be copied"):
        SamplingParams(extra_args={"lock": threading.Lock()}).snapshot()


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, SamplingParams.clone, replace, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_copies_are_equal_and_can_be_assigned_to(copied: Callable[[SamplingParams], SamplingParams]) -> None:
    params = SamplingParams(stop="x", logit_bias={1: 2.0}, extra_args={"a": 1}, output_kind=RequestOutputKind.DELTA)
    for one in (params, params.snapshot()):
        made = copied(one)
        assert made == one and made is not one
        made.stop = ["y"]
        assert made != one


def test_true_asks_for_one_logprob() -> None:
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (params.logprobs, params.prompt_logprobs) == (1, 1) and params.logprobs is not True


def test_from_optional_takes_what_servers_get() -> None:
    params = SamplingParams.from_optional(
        n=None, temperature=None, top_p=None, max_tokens=None, stop=None, logit_bias={"7": 900, 8: -900.0}
    )
    assert params == SamplingParams(max_tokens=None, logit_bias={7: 100.0, 8: -100.0})
    assert SamplingParams.from_optional() == SamplingParams()
    with pytest.raises(RequestError, match="logit_bias='x'; it must be token ids"):
        SamplingParams.from_optional(logit_bias={"x": 1.0})


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_tiny_temperatures_are_greedy() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=1e-7).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_tokens_of_another_vocabulary_are_refused() -> None:
    """Logits have no entry for such a token; as a stop token it is merely never sampled."""
    SamplingParams(allowed_token_ids=[9], logit_bias={9: 1.0}, stop_token_ids=[99]).check_vocabulary(10)
    with pytest.raises(RequestError, match="allowed_token_ids=10; it must be token ids below 10, the model's"):
        SamplingParams(allowed_token_ids=[3, 10]).check_vocabulary(10)
    with pytest.raises(RequestError, match="logit_bias=12; it must be token ids below 10"):
        SamplingParams(logit_bias={12: 1.0}).check_vocabulary(10)


def test_given_lists_are_copied() -> None:
    """Lists and mappings are copied."""
    bias, allowed, words = {1: 2.0}, [1, 2], ["no"]
    params = SamplingParams(logit_bias=bias, allowed_token_ids=allowed, bad_words=words)
    bias[1], allowed[0], words[0] = 0.0, 9, "yes"
    assert (params.logit_bias, params.allowed_token_ids, params.bad_words) == ({1: 2.0}, [1, 2], ["no"])
    again = SamplingParams(logit_bias={1: 2.0}, allowed_token_ids=(1, 2), bad_words=("no",))
    assert params == again


def test_tokens_may_be_numpy_integers() -> None:
    params = SamplingParams(stop_token_ids=np.array([3, 4]), logit_bias={np.int64(5): 1.0})  # type: ignore[dict-item]
    assert params == SamplingParams(stop_token_ids=[3, 4], logit_bias={5: 1.0})
    assert [type(token) for token in (*(params.stop_token_ids or ()), *(params.logit_bias or ()))] == [int] * 3


def test_numpy_numbers_become_pythons_and_booleans_are_refused() -> None:
    given: dict[str, Any] = {
        "temperature": np.float32(0.5),
        "max_tokens": np.int64(3),
        "top_k": np.int32(4),
        "seed": np.uint8(5),
        "logprobs": np.int64(1),
    }
    params = SamplingParams(**given)
    found = (params.temperature, params.max_tokens, params.top_k, params.seed, params.logprobs)
    assert found == (0.5, 3, 4, 5, 1) and [type(value) for value in found] == [float, int, int, int, int]
    assert type(SamplingParams(presence_penalty=np.float64(0.5)).presence_penalty) is float
    for options in ({"temperature": np.bool_(True)}, {"max_tokens": np.float32(3.0)}, {"top_p": np.float32("nan")}):
        with pytest.raises(RequestError, match=f"{next(iter(options))}="):
            SamplingParams(**options)


def test_several_completions_need_a_temperature() -> None:
    assert SamplingParams(n=3).n == 3
