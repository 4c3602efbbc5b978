"""`LLM(enable_lora=True)`: tokens with an adapter are those of the model that it is merged into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from piecegraph import LLM, LoRARequest, SamplingParams
from piecegraph.config import PASSES
from tests.runner.lora.adapters import write_adapter
from tests.runner.margin_rule import assert_same_tokens
from tests.runner.tiny_models import make_model, save

PROMPTS = [[5, 9, 2, 77, 31, 8], [64], list(range(3, 40))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"r": 8, "lora_alpha": 16},
    {"r": 3, "use_rslora": True},
    {"r": 4, "rank_pattern": {"layers.1.self_attn.q_proj": 7}, "alpha_pattern": {"down_proj": 2}},
    {"target_modules": "all-linear"},
    {"target_modules": r".*layers\.1\..*(q|v)_proj"},
    {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    {"target_modules": ["down_proj"], "layers_to_transform": [0], "r": 6},
]
"""How the adapters differ."""


class Family:
    """A model, and adapters for it, each with the model that it is merged into."""

    def __init__(self, folder: Path) -> None:
        self.model = make_model("llama")
        self.base = save(self.model, folder / "base")
        self.requests: list[LoRARequest] = []
        self.merged: list[PreTrainedModel] = []
        for number, options in enumerate(OPTIONS, start=1):
            path = folder / f"adapter{number}"
            self.merged.append(write_adapter(self.model, path, number, **options))
            self.requests.append(LoRARequest(f"adapter{number}", number, str(path)))

    def load(self, **options: object) -> LLM:
        arguments = {
            "skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "compiler": "eager", "num_kv_blocks": 64,
            "enable_lora": True, "max_loras": len(OPTIONS), "max_lora_rank": 8, **options,
        }  # fmt: skip
        return LLM(str(self.base), **arguments)  # type: ignore[arg-type]

    def check(
        self,
        llm: LLM,
        numbers: Sequence[int | None],
        prompts: Sequence[list[int]],
        alike: Sequence[int | None] | None = None,
    ) -> None:
        """Each prompt's tokens are those of its merged model alone, or of the model itself for None.

        `alike`: the adapters whose models are to give the tokens, if these are others.
        """
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        loras = [None if number is None else self.requests[number] for number in numbers]
        outputs = llm.generate(given, GREEDY, lora_request=loras, use_tqdm=False)
        for number, prompt, output in zip(alike or numbers, prompts, outputs, strict=True):
            model = self.model if number is None else self.merged[number]
            assert_same_tokens(model, prompt, output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def llm(family: Family) -> Iterator[LLM]:
    with family.load() as llm:
        yield llm


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_tokens_of_an_adapter_alone(number: int, family: Family, llm: LLM) -> None:
    """They are others than those of the model itself."""
    family.check(llm, [number] * len(PROMPTS), PROMPTS)
    with pytest.raises(AssertionError, match="token"):
        family.check(llm, [number] * len(PROMPTS), PROMPTS, alike=[None] * len(PROMPTS))


def test_tokens_of_eight_adapters_and_none_in_a_batch(family: Family, llm: LLM) -> None:
    numbers = [*range(len(OPTIONS)), None, None]
    prompts = [[*PROMPTS[0], number or 0] for number in range(len(numbers))]
    family.check(llm, numbers, prompts)
    family.check(llm, numbers[::-1], prompts)


def mixed(family: Family, llm: LLM) -> None:
    """Check a batch of three adapters and none, twice: the second time prompts are cached."""
    for _ in range(2):
        family.check(llm, [3, None, 6, 1], [*PROMPTS, PROMPTS[0]])


def test_every_pass_keeps_the_tokens(family: Family) -> None:
    """Those of a GPU too, whose ops run their references here; what has an adapter in it is merged or left alone."""
    with family.load(compilation_config={"passes": PASSES}, max_loras=4) as llm:
        mixed(family, llm)
        matches = {row.name: row.matches for row in llm.compiled.report().passes}
        assert matches["merge-projections"] == 4 and matches["select-rows-early"] == 0, matches
        (missed,) = [row.misses for row in llm.compiled.report().passes if row.name == "select-rows-early"]
        assert len(missed) == 1 and missed[0].reason


@pytest.mark.slow
def test_compiled_pieces_and_a_warm_start(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start finds what the first has compiled, and neither compiles anything for an adapter."""
    monkeypatch.setenv("PIECEGRAPH_CACHE", "on")
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path))
    for is_warm in (False, True):
        with family.load(compiler="inductor", max_loras=4) as llm:
            mixed(family, llm)
            assert (llm.compiled.report().trace_seconds == 0) == is_warm
