"""The loaded adapters: found by number, evicted by last use, pinned ones kept, and left as they are by a failure."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from piecegraph import LoRARequest
from piecegraph.errors import CheckpointError, RequestError
from piecegraph.runner.lora.modules import LoraOptions, adapt_modules
from piecegraph.runner.lora.store import AdapterStore
from tests.runner.lora.adapters import write_adapter
from tests.runner.tiny_models import make_model


@pytest.fixture
def requests(tmp_path: Path) -> list[LoRARequest]:
    made = []
    for number in (1, 2, 3):
        write_adapter(make_model("llama"), tmp_path / str(number), number, target_modules=["q_proj"])
        made.append(LoRARequest(f"a{number}", number, str(tmp_path / str(number))))
    return made


@pytest.fixture
def store() -> AdapterStore:
    cpu = torch.device("cpu")
    modules = adapt_modules(make_model("llama"), LoraOptions(num_slots=2, max_rank=4), dtype=torch.float32, device=cpu)
    return AdapterStore(modules, capacity=2, dtype=torch.float32, device=cpu)


def test_the_least_recently_used_goes_and_is_read_again(store: AdapterStore, requests: list[LoRARequest]) -> None:
    first = store.add(requests[0])
    store.add(requests[1])
    assert store.add(requests[0]) is first
    store.add(requests[2])
    assert set(store.loaded()) == {1, 3}
    assert store.add(requests[1]).digest != first.digest
    assert set(store.loaded()) == {2, 3}
    again = store.add(requests[0])
    assert again is not first and again.digest == first.digest


def test_pinned_ones_stay_until_they_are_removed(store: AdapterStore, requests: list[LoRARequest]) -> None:
    first = store.add(requests[0])
    assert store.pin(1) and not store.pin(9)
    store.add(requests[1])
    store.add(requests[2])
    assert set(store.loaded()) == {1, 3} and store.pinned_digests == {first.digest}
    with pytest.raises(RequestError, match="adapter 3 cannot be pinned: max_loras=2 leaves room for 1 pinned"):
        store.pin(3)
    assert store.remove(1) and not store.remove(1) and not store.pinned_digests
    assert store.pin(3)


def test_files_must_be_those_that_another_process_has_read(store: AdapterStore, requests: list[LoRARequest]) -> None:
    """A folder that has changed since is refused; with the new digest it is read again, and the old one is gone."""
    first, folder = requests[0], Path(requests[0].lora_path)
    before = store.add_with_digest(first, store.add(first).digest)
    assert before is store.add(first)
    store.pin(1)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(Path(requests[1].lora_path) / file, folder / file)
    assert store.add_with_digest(first, before.digest) is before  # it is loaded, and is not read again
    store.remove(1)
    with pytest.raises(CheckpointError, match=f"digest was {before.digest.hex()[:16]}, and is .* remove adapter 1"):
        store.add_with_digest(first, before.digest)
    assert not store.loaded()
    after = store.add(first)
    store.pin(1)
    assert store.add_with_digest(first, after.digest) is after and store.pinned_digests == {after.digest}
    with pytest.raises(CheckpointError, match="digest"):
        store.add_with_digest(first, before.digest)
    assert not store.loaded() and not store.pinned_digests


def test_a_pin_of_another_process_outlives_a_replaced_folder(store: AdapterStore, requests: list[LoRARequest]) -> None:
    """The files are replaced between their check there and the arrival of the pin here, and later put back.

    A request that was checked with other files is refused and ends no pin; removal does.
    """
    first, folder = requests[0], Path(requests[0].lora_path)
    checked, other = store.add(first).digest, store.add(requests[1]).digest
    store.remove(1)
    shutil.copytree(folder, folder.with_name("kept"))
    shutil.copytree(requests[1].lora_path, folder, dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match="are not those that were checked"):
        store.pin_with_digest(first, checked)
    with pytest.raises(CheckpointError, match="adapter 1, 'a1', was replaced while the request was on its way"):
        store.add_with_digest(first, other)
    assert set(store.loaded()) == {2} and not store.pinned_digests
    shutil.copytree(folder.with_name("kept"), folder, dirs_exist_ok=True)
    made = store.add_with_digest(first, checked)
    assert store.pinned_digests == {checked}
    with pytest.raises(CheckpointError, match="was replaced while the request was on its way"):
        store.add_with_digest(first, other)
    store.add(requests[2])
    assert store.add(first) is made and store.pinned_digests == {checked}
    assert store.remove(1) and not store.pinned_digests
    store.add_with_digest(first, checked)
    assert not store.pinned_digests


def test_a_number_is_of_one_folder(store: AdapterStore, requests: list[LoRARequest]) -> None:
    store.add(requests[0])
    with pytest.raises(RequestError, match="lora_int_id=1 is the adapter 'a1' from .* remove that one first"):
        store.add(LoRARequest("other", 1, requests[1].lora_path))
    store.remove(1)
    assert store.add(LoRARequest("other", 1, requests[1].lora_path)).request.lora_name == "other"


def test_a_failure_changes_nothing(store: AdapterStore, requests: list[LoRARequest]) -> None:
    store.add(requests[0])
    store.add(requests[1])
    shutil.rmtree(requests[2].lora_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        store.add(requests[2])
    assert set(store.loaded()) == {1, 2}


def test_there_may_be_no_room(store: AdapterStore, requests: list[LoRARequest]) -> None:
    """Capacity 1 and a pinned adapter."""
    small = AdapterStore(store.modules, capacity=1, dtype=torch.float32, device=torch.device("cpu"))
    small.add(requests[0])
    small.pin(1)
    with pytest.raises(RequestError, match="all 1 loaded adapters are pinned, and max_cpu_loras=1; remove one"):
        small.add(requests[1])
    assert set(small.loaded()) == {1}
