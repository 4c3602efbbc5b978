"""While a quantised model loads, there is no more than its quantised weights and a part of its floats."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runner.quantization.checkpoints.written import FORMATS, write_checkpoint
from tests.runner.quantization.expert_models import mixture, write_mxfp4
from tests.runner.tiny_models import make_config, random_model, save

SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SHARD = 60_000_000
"""The size of a file. Several matrices of 3 MB are in work at a time, so smaller files would be no bound."""

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a process's own memory is read as Linux tells it")


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 300 MB of float32 in shards."""
    folder = tmp_path_factory.mktemp("floats")
    random_model(make_config("LlamaConfig", **SIZES)).save_pretrained(folder, max_shard_size=SHARD)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(make_config("LlamaConfig")), tmp_path_factory.mktemp("small"))


def loaded(folder: Path, small: Path, quantization: str) -> tuple[int, int]:
    """Return the bytes of memory at their most, and those of the parameters, of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.runner.quantization.peak_memory", str(folder), str(small), quantization],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak, params = done.stdout.split()
    return int(peak), int(params)


@LINUX
@pytest.mark.slow
def test_a_plain_checkpoint_takes_its_quantised_size_and_one_shard(floats: Path, small: Path) -> None:
    """In bfloat16 its floats would be 151 MB. Without quantisation all of them are found, so a copy would be seen."""
    peak, params = loaded(floats, small, "int8")
    assert 70e6 < params < 80e6 and params < peak < params + SHARD, (peak, params)
    peak, params = loaded(floats, small, "-")
    assert params > 150e6 and peak > params - SHARD / 4, (peak, params)


@LINUX
@pytest.mark.slow
def test_so_does_one_in_4_bits(floats: Path, small: Path) -> None:
    """Linears have 38 MB of values and 9 MB of scales and offsets in bfloat16."""
    peak, params = loaded(floats, small, "int4")
    assert 45e6 < params < 52e6 and params < peak < params + SHARD, (peak, params)


@LINUX
@pytest.mark.slow
def test_a_quantised_checkpoint_takes_its_size_and_one_shard(tmp_path: Path, small: Path) -> None:
    """The file has compressed-tensors' int8 weights, of which a second copy would be 75 MB."""
    config, write, _ = FORMATS["W8A8"]
    write_checkpoint(tmp_path, config, write, **SIZES)  # type: ignore[arg-type]  # sizes by name
    peak, params = loaded(tmp_path, small, "-")
    assert 70e6 < params < 85e6 and peak < params + SHARD, (peak, params)


EXPERTS = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_local_experts": 8}
"""Of 75 million weights of experts, 8.4 million in a projection of a layer."""


@LINUX
@pytest.mark.slow
def test_experts_of_a_plain_checkpoint_take_their_quantised_size_and_one_shard(tmp_path: Path, small: Path) -> None:
    """In bfloat16 they would be 151 MB."""
    mixture("mixtral", **EXPERTS).save_pretrained(tmp_path, max_shard_size=SHARD)
    peak, params = loaded(tmp_path, small, "int8")
    assert 75e6 < params < 85e6 and params < peak < params + SHARD, (peak, params)


@LINUX
@pytest.mark.slow
def test_experts_in_mxfp4_take_their_size_and_one_shard(tmp_path: Path, small: Path) -> None:
    """In bfloat16 they would be 151 MB."""
    layers = ["sliding_attention", "full_attention"] * 3
    write_mxfp4(tmp_path, **EXPERTS, layer_types=layers)
    peak, params = loaded(tmp_path, small, "-")
    assert 40e6 < params < 50e6 and peak < params + SHARD, (peak, params)
