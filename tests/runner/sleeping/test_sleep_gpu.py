"""Sleep on a GPU: memory is given back to the device, and the graphs captured before give the same tokens after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import LLM, SamplingParams
from piecegraph.errors import ConfigError, OutOfMemory, UsageError
from tests.runner.tiny_models import llama_config, random_model, save

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
PROMPTS: list[Any] = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9] * 100}, {"prompt_token_ids": [3]}]
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with about 100 MiB of weights, so that their memory is seen beside everything else."""
    config = llama_config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        head_dim=64,
        max_position_embeddings=256,
    )
    return save(random_model(config), tmp_path_factory.mktemp("llama"))


def load(folder: Path, **options: Any) -> LLM:
    return LLM(
        folder,
        skip_tokenizer_init=True,
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=4,
        max_num_batched_tokens=128,
        max_model_len=256,
        gpu_memory_utilization=0.3,
        enable_sleep_mode=True,
        **options,
    )


def answers(llm: LLM) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def used_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 512}], ids=["sized-by-memory", "given"])
def test_tokens_after_a_wake_up_equal_those_before(folder: Path, options: dict[str, Any], mode: str) -> None:
    """Levels 1 and 2 in turn, and 2 behind 1: the memory is the device's meanwhile, nothing is captured again."""
    with load(folder, cudagraph_mode=mode, compiler="eager", **options) as llm:
        before = answers(llm)
        weights = [tensor for _, tensor in llm.compiled.bound_tensors()]
        addresses = [tensor.data_ptr() for tensor in weights]
        awake = used_bytes()
        for levels in ((1,), (2,), (1, 2), (1,)):
            freed = [llm.sleep(level) for level in levels]
            asleep = used_bytes()
            assert awake - asleep >= sum(freed) - 16 * MIB and freed[0] > 30 * MIB, (awake, asleep, freed)
            with pytest.raises(UsageError, match="the engine sleeps"):
                answers(llm)
            llm.wake_up()
            assert abs(used_bytes() - awake) <= 16 * MIB
            assert [tensor.data_ptr() for tensor in weights] == addresses
            assert answers(llm) == before


def test_compiled_pieces_sleep_too(folder: Path) -> None:
    """Under Inductor, with pieces of static sizes and merged projections."""
    with load(folder) as llm:
        before = answers(llm)
        for level in (1, 2):
            assert llm.sleep(level) > 30 * MIB
            llm.wake_up()
            assert answers(llm) == before


def test_the_memory_of_a_sleeper_can_be_used_by_others(folder: Path) -> None:
    """A wake-up without memory for it raises, and one with it succeeds later."""
    with load(folder, compiler="eager") as llm:
        before = answers(llm)
        freed = llm.sleep(1)
        free_bytes, _ = torch.cuda.mem_get_info()
        taken = torch.full((free_bytes - freed // 2,), 7, dtype=torch.uint8, device="cuda")
        with pytest.raises(OutOfMemory, match="asked for"):
            llm.wake_up()
        assert llm.is_sleeping
        assert int(taken[-1]) == 7
        del taken
        torch.cuda.empty_cache()
        llm.wake_up()
        assert answers(llm) == before


def test_a_fast_start_sleeps_once_it_is_over(folder: Path) -> None:
    with load(folder, start="fast") as llm:
        before = answers(llm)
        if str(llm.start_progress) != "full speed":
            with pytest.raises(UsageError, match="the start is not over"):
                llm.sleep()
        llm.finish_start()
        at_full_speed = answers(llm)
        assert len(before) == len(at_full_speed)
        llm.sleep()
        llm.wake_up()
        assert answers(llm) == at_full_speed


def test_without_the_argument_it_is_refused(folder: Path) -> None:
    with LLM(folder, skip_tokenizer_init=True, device="cuda", compiler="eager", max_model_len=256) as llm:
        with pytest.raises(UsageError, match="must be made with enable_sleep_mode=True"):
            llm.sleep()
        assert len(answers(llm)) == 3


def test_what_cannot_sleep_on_a_gpu_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="not yet available with enable_lora on a GPU"):
        load(folder, enable_lora=True, compiler="eager")
