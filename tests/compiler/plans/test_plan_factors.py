"""The key of a plan: every factor changes the key, and nothing else does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import piecegraph as pg
from piecegraph.cache.store.keys import EXCLUDED, key_of
from piecegraph.compiler.keys import machine_factors, own_sources
from piecegraph.compiler.plans.plan_factors import plan_factors
from piecegraph.compiler.tracing.signature import ExampleCall
from piecegraph.errors import KeyFactorError
from tests.compiler.store.small_models import SIZE, Small, config
from tests.compiler.user_passes import ReluToClampInInductor


def key(
    options: dict[str, Any] | None = None,
    *,
    example: Any = None,
    dims: Any = None,
    model: torch.nn.Module | None = None,
) -> str:
    module = model or Small()
    example = torch.ones(3, SIZE) if example is None else example
    call = ExampleCall.of(module, (example,), {}, {"x": {0: "num_tokens"}} if dims is None else dims)
    return key_of(plan_factors(module, call, config(**(options or {}))))


OTHERS: dict[str, Any] = {
    "split_ops": ("pgtoy::attention",),
    "compiler": "eager",
    "inductor_options": {"max_autotune": True},
    "compile_sizes": (1, 2),
    "compile_sizes_options": {},
    "compile_sizes_options_up_to": 8,
    "passes": ("eliminate-noops",),
    "compile_workers": 3,
    "expect": {},
    "strict": True,
    "selfcheck": True,
    "dump_dir": "somewhere",
    "cache": "pieces",
    "cache_dir": "/somewhere",
    "signing_key_file": "/somewhere/key",
}
"""A value for each field of the config, other than the one `config` gives it."""


def test_every_field_of_the_config_is_tried() -> None:
    assert set(OTHERS) == {field.name for field in dataclasses.fields(pg.CompileConfig)}


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_is_in_the_key_unless_it_is_excluded(name: str) -> None:
    assert (key({name: OTHERS[name]}) == key()) is (name in EXCLUDED)


def test_passes_count_by_their_source() -> None:
    """A caller's pass counts by its `uuid`, which includes its options."""
    keys = [
        key({"passes": (each,)})
        for each in (ReluToClampInInductor(), ReluToClampInInductor(bound=2.0), "eliminate-noops")
    ]
    assert len({*keys, key({"passes": None}), key()}) == 5


EXAMPLES: dict[str, Callable[[], dict[str, Any]]] = {
    "dtype": lambda: {"example": torch.ones(3, SIZE, dtype=torch.float64)},
    "strides": lambda: {"example": torch.ones(SIZE, 3).t()},
    "sizes": lambda: {"example": torch.ones(3, 2 * SIZE)},
    "a fixed dim": lambda: {"dims": {}},
    "a size's name": lambda: {"dims": {"x": {0: "rows"}}},
    "two dims": lambda: {"dims": {"x": {0: "num_tokens", 1: "width"}}},
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_call_is_in_the_key(name: str) -> None:
    assert key(**EXAMPLES[name]()) != key()


def test_dynamic_sizes_and_values_are_not_in_the_key() -> None:
    assert key(example=torch.zeros(9, SIZE)) == key()


class Flagged(torch.nn.Module):
    def forward(self, x: torch.Tensor, flag: Any = None) -> torch.Tensor:
        return x


def test_arguments_other_than_tensors_count_by_value() -> None:
    module = Flagged()

    def flagged(flag: Any) -> str:
        call = ExampleCall.of(module, (torch.ones(3, SIZE), flag), {}, {})
        return key_of(plan_factors(module, call, config()))

    assert len({flagged(flag) for flag in (None, 1, True, 1.0, "a")}) == 5
    with pytest.raises(KeyFactorError, match="argument flag is a builtins.object, of which no key can be made"):
        flagged(object())


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_settings_of_the_process_are_in_the_key(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key()]
    torch.set_num_threads(torch.get_num_threads() + 1)
    keys.append(key())
    with torch.autocast("cpu", torch.bfloat16):
        keys.append(key())
    with torch.inference_mode():
        keys.append(key())
    with torch._inductor.config.patch(epilogue_fusion=False):
        keys.append(key())
    with torch._dynamo.config.patch(assume_static_by_default=False):
        keys.append(key())
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (machine_factors, "__version__", "99"),
        (machine_factors, "digest_of_own_sources", lambda patterns: "another"),
        (torch.version, "git_version", "another"),
        (torch, "__version__", "99"),
        (machine_factors, "cpu_capability", lambda: "AVX1024"),
    ],
)
def test_build_and_machine_are_in_the_key(owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(owner, name, value)
    machine_factors._cpu.cache_clear()
    assert key() != before
    monkeypatch.undo()
    machine_factors._cpu.cache_clear()
    assert key() == before
    assert own_sources.digest_of_own_sources(own_sources.PLAN_SOURCES)


def test_no_path_is_in_the_key(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.chdir(tmp_path)
    assert key() == before
    module = Small()
    call = ExampleCall.of(module, (torch.ones(3, SIZE),), {}, {})
    assert "/" not in str(plan_factors(module, call, config())["settings"])
