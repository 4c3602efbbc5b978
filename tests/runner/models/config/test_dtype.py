"""The dtype of the weights follows from the argument, the checkpoint, the device and the processor."""

from __future__ import annotations

import pytest
import torch

from piecegraph.errors import ConfigError
from piecegraph.runner.models.config.dtype import resolve_dtype
from tests.runner.tiny_models import llama_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("stored", "instructions", "wanted"),
    [
        (torch.bfloat16, {"avx512f", "avx512_bf16"}, torch.bfloat16),
        (torch.float16, {"amx_bf16"}, torch.bfloat16),
        (torch.bfloat16, {"asimd", "bf16"}, torch.bfloat16),
        (torch.bfloat16, {"avx512f", "avx512_vnni"}, torch.float32),
        (torch.bfloat16, set(), torch.float32),
        (torch.float32, {"avx512_bf16"}, torch.float32),
    ],
)
def test_the_dtype_on_a_cpu_follows_from_its_instructions(
    stored: torch.dtype, instructions: set[str], wanted: torch.dtype
) -> None:
    """Checkpoints of 16 bits are bfloat16 where the processor multiplies that; a dtype that is given is kept."""
    config = llama_config(dtype=stored)
    listed = frozenset(instructions)
    assert resolve_dtype("auto", config, CPU, instructions=listed) == wanted
    assert resolve_dtype("float32", config, CPU, instructions=listed) == torch.float32
    assert resolve_dtype("auto", config, CPU, "int8", instructions=listed) == torch.bfloat16


def test_dtype_names() -> None:
    """auto: on the CPU by its instructions; on a GPU the checkpoint's if it has 16 bits, else bfloat16."""
    config, gpu = llama_config(), torch.device("cuda")
    assert resolve_dtype("auto", config, CPU) == torch.float32
    assert resolve_dtype("auto", config, gpu) == torch.bfloat16
    assert resolve_dtype("auto", llama_config(dtype=torch.float16), gpu) == torch.float16
    assert resolve_dtype("half", config, CPU) == torch.float16
    assert resolve_dtype(torch.bfloat16, config, CPU) == torch.bfloat16
    with pytest.raises(ConfigError, match=r"dtype='bfloat15' is unknown\. Did you mean 'bfloat16'"):
        resolve_dtype("bfloat15", config, CPU)
    with pytest.raises(ConfigError, match=r"dtype=torch\.int8 cannot run here"):
        resolve_dtype(torch.int8, config, CPU)
