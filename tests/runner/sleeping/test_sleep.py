"""Sleep gives memory back, and after a wake-up the same graphs over the same addresses give the same tokens.

Also tests `device_memory/host_memory/released_memory.py` and `device_memory/restorable_storages.py`.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph import LLM, SamplingParams
from piecegraph.errors import UsageError
from piecegraph.runner.device_memory.host_memory.released_memory import release
from piecegraph.runner.device_memory.restorable_storages import restorable
from piecegraph.runner.sleeping import sleep
from tests.runner.tiny_models import llama_config, random_model, save

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
PROMPTS: list[Any] = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9] * 40}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(llama_config(vocab_size=64)), tmp_path_factory.mktemp("llama"))


def load(folder: Path, **options: Any) -> LLM:
    return LLM(
        folder,
        skip_tokenizer_init=True,
        device="cpu",
        compiler="eager",
        graph_kind="recorded",
        attention_backend="triton",
        num_kv_blocks=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        cudagraph_capture_sizes=(1, 2, 4, 64),
        **options,
    )


def answers(llm: LLM) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_released_memory_is_given_back_and_keeps_its_address() -> None:
    tensor = torch.ones(32 << 20, dtype=torch.uint8)
    before, address = resident_bytes(), tensor.data_ptr()
    assert 31 << 20 < release([tensor, tensor[5:]]) <= 32 << 20
    assert before - resident_bytes() > 24 << 20
    assert tensor.data_ptr() == address
    tensor.fill_(3)
    assert int(tensor.to(torch.int64).sum()) == 3 * tensor.numel()
    assert release([torch.ones(3)]) == 0


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_tokens_after_a_wake_up_equal_those_before(folder: Path, level: int, load_format: str) -> None:
    """Weights have other values while level 2 sleeps, and all tensors have the addresses of the captured graphs."""
    with load(folder, load_format=load_format) as llm:
        before = answers(llm)
        weights = [tensor for _, tensor in llm.compiled.bound_tensors()]
        addresses = [tensor.data_ptr() for tensor in weights]
        values = [tensor.clone() for tensor in weights]
        assert llm.sleep(level) > 0
        assert llm.is_sleeping
        is_changed = any(not torch.equal(now, then) for now, then in zip(weights, values, strict=True))
        assert is_changed == (level == 2)
        with pytest.raises(UsageError, match="the engine sleeps; call wake_up first"):
            answers(llm)
        assert llm.sleep(1) == 0
        llm.wake_up()
        llm.wake_up()
        assert not llm.is_sleeping
        assert [tensor.data_ptr() for tensor in weights] == addresses
        assert all(torch.equal(now, then) for now, then in zip(weights, values, strict=True))
        assert answers(llm) == before


def test_what_cannot_be_restored_is_refused(folder: Path) -> None:
    with load(folder) as llm:
        with pytest.raises(UsageError, match="level=3; it must be 1"):
            llm.sleep(3)
        llm.engine.add_request("a", [5], GREEDY)
        with pytest.raises(UsageError, match="1 requests are unfinished"):
            llm.sleep()
        llm.engine.abort("a")
        llm.sleep()
        llm.wake_up()
        assert len(answers(llm)) == 2


def test_only_storages_that_a_reload_fills_are_dropped() -> None:
    """A buffer that is not in the state dict, and what shares its storage, keep their values."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both, merged = torch.zeros(8), torch.zeros(8)
            self.register_buffer("kept", both[:4])
            self.register_buffer("computed", both[4:], persistent=False)
            self.first, self.second = torch.nn.Parameter(merged[:4]), torch.nn.Parameter(merged[4:])

    module = Module()
    assert [tensor.data_ptr() for tensor in restorable(module)] == [module.first.data_ptr()]


def test_weights_cannot_be_reloaded_asleep_or_lost_by_sleep(folder: Path) -> None:
    """Level 2 reads the model's own files at the wake-up, so others would be gone without a word."""
    with load(folder) as llm:
        loaded: Any = llm._loaded
        own, before = dict(loaded.model.model.state_dict()), answers(llm)
        others = {name: torch.roll(value, 1, 0) for name, value in own.items()}
        for level in (1, 2):
            llm.sleep(level)
            with pytest.raises(UsageError, match="the engine sleeps"):
                llm.reload_weights(others)
            llm.wake_up()
        assert answers(llm) == before
        llm.reload_weights(others)
        changed = answers(llm)
        assert changed != before
        with pytest.raises(UsageError, match="after reload_weights"):
            llm.sleep(2)
        assert not llm.is_sleeping
        llm.sleep(1)
        llm.wake_up()
        assert answers(llm) == changed
        llm.reload_weights()
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm) == before


@pytest.mark.parametrize("level", [1, 2])
def test_a_call_that_is_cut_off_leaves_an_engine_that_wakes_up(
    folder: Path, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(folder) as llm:
        before = answers(llm)

        def fail(*arguments: object) -> int:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(sleep, "release_on_cpu", fail)
            with pytest.raises(KeyboardInterrupt):
                llm.sleep(level)
        assert llm.is_sleeping
        with pytest.raises(UsageError, match="call wake_up first"):
            answers(llm)
        assert llm.sleep(level) > 0 and llm.sleep(level) == 0
        llm.wake_up()
        assert answers(llm) == before
