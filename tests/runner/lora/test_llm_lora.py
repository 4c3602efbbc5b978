"""`LLM(enable_lora=True)`: tokens with an adapter are those of the model that it is merged into."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from piecegraph import LLM, LoRARequest, SamplingParams
from piecegraph.compiler.graphs.cudagraph_mode import CUDAGraphMode
from piecegraph.config import PASSES
from piecegraph.errors import CheckpointError, RequestError, SelfcheckFailed, UsageError
from piecegraph.passes.ops.lora import LoraRows
from piecegraph.runner.cudagraphs.manager import CudaGraphManager
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


def test_a_step_without_adapters_runs_none_of_their_code(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket has a graph of either kind, and the dispatcher picks by what the batch has."""
    with family.load(
        max_loras=4, graph_kind="recorded", attention_backend="triton", cudagraph_capture_sizes=[2, 4]
    ) as llm:
        for mode, graphs in llm.runner.graphs.graphs.items():
            kinds = Counter(each.num_active_loras for each in graphs.descriptors)
            assert set(kinds) == {0, 4} and kinds[0] == kinds[4], mode
        dispatched: list[int] = []
        dispatch = llm.runner.dispatcher.dispatch

        def counted(**batch: Any) -> Any:
            found = dispatch(**batch)
            dispatched.append(found.descriptor.num_active_loras)
            return found

        monkeypatch.setattr(llm.runner.dispatcher, "dispatch", counted)
        family.check(llm, [2, None], PROMPTS[:2])
        assert set(dispatched) == {4}
        dispatched.clear()
        for name in ("groups", "__init__"):
            monkeypatch.setattr(LoraRows, name, None)  # a call would raise
        family.check(llm, [None, None], PROMPTS[:2])
        assert set(dispatched) == {0} and llm.runner.counters.by_mode()[CUDAGraphMode.FULL] > 0


def test_a_bad_adapter_runs_nothing_and_others_go_on(family: Family, llm: LLM, tmp_path: Path) -> None:
    bad = LoRARequest("bad", 77, str(tmp_path))
    before = llm.engine.num_output_tokens, set(llm.llm_engine.list_loras())
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json") as raised:
        llm.generate([{"prompt_token_ids": PROMPTS[0]}] * 2, GREEDY, lora_request=[family.requests[0], bad])
    assert raised.value.exit_code == 3
    assert llm.engine.num_output_tokens == before[0] and 77 not in llm.llm_engine.list_loras()
    family.check(llm, [0, None], PROMPTS[:2])


def test_adapters_by_vllms_engine(family: Family, llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.add_lora(family.requests[0]) and engine.pin_lora(1) and not engine.pin_lora(99)
    assert 1 in engine.list_loras()
    engine.add_request("x", {"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=family.requests[0])
    assert engine.remove_lora(1) and 1 not in engine.list_loras()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert_same_tokens(family.merged[0], PROMPTS[0], outputs[-1].outputs[0].token_ids)


def test_prompts_as_embeddings_and_several_completions(family: Family) -> None:
    """Such a step runs the model's own code, in which the same modules have adapters."""
    with family.load(max_loras=2, enable_prompt_embeds=True) as llm:
        embedding = family.model.get_parameter("model.embed_tokens.weight").data
        prompt = {"prompt_embeds": embedding[torch.tensor(PROMPTS[0])]}
        (output,) = llm.generate(prompt, GREEDY, lora_request=family.requests[1], use_tqdm=False)
        assert_same_tokens(family.merged[1], PROMPTS[0], output.outputs[0].token_ids)
        drawn = SamplingParams(temperature=1.0, n=3, max_tokens=4, seed=5, prompt_logprobs=0)
        (output,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, drawn, lora_request=family.requests[6])
        assert len(output.outputs) == 3 and output.prompt_logprobs is not None
        with torch.no_grad():
            logits = family.merged[6](torch.tensor([PROMPTS[0]])).logits[0].double().log_softmax(-1)
        for position, row in enumerate(output.prompt_logprobs[1:], start=1):
            token = PROMPTS[0][position]
            assert row is not None and row[token].logprob == pytest.approx(float(logits[position - 1, token]), abs=1e-3)


def test_adapters_that_are_not_enabled_are_refused(family: Family, llama_dir: Path) -> None:
    with LLM(llama_dir, dtype="float32", compiler="eager", num_kv_blocks=8) as plain:
        with pytest.raises(RequestError, match="'adapter1', and adapters are not enabled; make the LLM"):
            plain.generate("a", GREEDY, lora_request=family.requests[0])
        with pytest.raises(UsageError, match="adapters are not enabled"):
            plain.llm_engine.list_loras()


def test_a_selfcheck_runs_what_adapters_add(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second row has a random adapter, as have the requests whose replays are compared; then none is left."""
    groups = LoraRows.groups
    found: Counter[str] = Counter()

    def counted(self: LoraRows, kind: str, num_rows: int) -> Any:
        slots = groups(self, kind, num_rows)
        found[kind] += bool(slots)
        return slots

    monkeypatch.setattr(LoraRows, "groups", counted)
    with family.load(
        max_loras=4, graph_kind="recorded", attention_backend="triton", cudagraph_capture_sizes=[2, 4],
        compilation_config={"passes": PASSES, "selfcheck": True},
    ) as llm:  # fmt: skip
        assert llm.selfcheck is not None and len(llm.selfcheck.values) > 10
        num_graphs = sum(len(graphs.descriptors) for graphs in llm.runner.graphs.graphs.values())
        assert len(llm.selfcheck.replays) == num_graphs
        assert found["tokens"] > 100 and found["logits"] > 10
        mixed(family, llm)


def test_a_selfcheck_sees_a_wrong_result_of_adapters(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that leaves adapters out differs from the pieces at the same shape."""
    replay = CudaGraphManager.replay_full

    def without_adapters(self: CudaGraphManager, descriptor: Any) -> Any:
        return replay(self, dataclasses.replace(descriptor, num_active_loras=0))

    monkeypatch.setattr(CudaGraphManager, "replay_full", without_adapters)
    with pytest.raises(SelfcheckFailed, match="the FULL graph of . tokens computes other logits than the pieces"):
        family.load(
            max_loras=2, graph_kind="recorded", attention_backend="triton", cudagraph_capture_sizes=[2],
            compilation_config={"selfcheck": True},
        )  # fmt: skip
