"""What computes the prompts of layers with states, and why, for devices, packages, dtypes and sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from piecegraph.runner.common.engine_config import EngineConfig
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.inspect.explanation import explain
from piecegraph.runner.state_layers.calls import LINEAR_ATTENTION_OP, MAMBA_MIXER_OP, SHORT_CONV_OP, scan_kind
from piecegraph.runner.state_layers.layer import StateLayer, library_notes, with_libraries
from piecegraph.runner.state_layers.libraries.choice import Library, Rule, ScanKind, choose_library
from tests.runner.tiny_models import HYBRIDS

ALL: Mapping[Library, str | None] = dict.fromkeys(Library)
NONE = dict.fromkeys(Library, "not installed (pip install it)")
DELTA = ScanKind(rule=Rule.DELTA, dtype=torch.bfloat16, key_dim=128)
MAMBA2 = ScanKind(rule=Rule.MAMBA2, dtype=torch.float16, key_dim=64)


def test_a_gpu_runs_the_library_of_a_rule() -> None:
    found = [choose_library(kind, "cuda", ALL) for kind in (DELTA, MAMBA2)]
    assert [each.library for each in found] == [Library.FLA, Library.MAMBA_SSM]
    assert [each.reason for each in found] == ["by flash-linear-attention", "by mamba-ssm"]


@pytest.mark.parametrize(
    ("kind", "device", "installed", "reason"),
    [
        (DELTA, "cpu", ALL, "the device is cpu"),
        (DELTA, "cuda", NONE, r"flash-linear-attention is not installed \(pip install it\)"),
        (MAMBA2, "cuda", NONE, r"mamba-ssm is not installed"),
        (replace(DELTA, dtype=torch.float32), "cuda", ALL, "would multiply torch.float32 with fewer bits"),
        (replace(DELTA, key_dim=512), "cuda", ALL, "has heads of up to 256, and these have 512"),
        (replace(DELTA, rule=Rule.DELTA_BY_CHANNEL), "cuda", ALL, "would wait for the device in each step"),
        (replace(MAMBA2, rule=Rule.MAMBA), "cuda", ALL, "begins each of these scans without a state"),
    ],
)
def test_else_torch_does_and_the_reason_is_said(
    kind: ScanKind, device: str, installed: Mapping[Library, str | None], reason: str
) -> None:
    found = choose_library(kind, device, installed)
    assert found.library is None and re.match(f"in torch: .*{reason}", found.reason), found


def test_the_rule_is_read_from_the_call() -> None:
    spec = [torch.empty(3, 64, dtype=torch.bfloat16), torch.empty(3, 4), torch.empty(4), torch.empty(3, 4, 8)]
    delta = [spec[0], spec[1], spec[1], spec[0], None, spec[3], 2, 8, 1.0, "layer"]
    assert scan_kind(LINEAR_ATTENTION_OP, delta) == ScanKind(rule=Rule.DELTA, dtype=torch.bfloat16, key_dim=8)
    delta[1] = spec[3]
    assert getattr(scan_kind(LINEAR_ATTENTION_OP, delta), "rule", None) is Rule.DELTA_BY_CHANNEL
    mixer = [spec[0], spec[1], spec[2], spec[2], None, None, spec[3], 1, 16, "layer"]
    assert scan_kind(MAMBA_MIXER_OP, mixer) == ScanKind(rule=Rule.MAMBA2, dtype=torch.bfloat16, key_dim=16)
    mixer[2] = spec[1]
    assert getattr(scan_kind(MAMBA_MIXER_OP, mixer), "rule", None) is Rule.MAMBA
    assert scan_kind(SHORT_CONV_OP, [spec[0], spec[0], None, None, spec[0], "layer"]) is None


def test_layers_are_asked_about_once_and_on_a_gpu_alone() -> None:
    layers = [StateLayer(name=str(i), op=LINEAR_ATTENTION_OP, states=(), scan=DELTA) for i in range(3)]
    asked: list[None] = []

    def installed() -> Mapping[Library, str | None]:
        asked.append(None)
        return ALL

    found = with_libraries(layers, "cuda", installed)
    assert [layer.prompts and layer.prompts.library for layer in found] == [Library.FLA] * 3
    assert library_notes(found) == ("prompts: the gated delta rule runs by flash-linear-attention",)
    with_libraries(layers, "cpu", installed)
    with_libraries([StateLayer(name="conv", op=SHORT_CONV_OP, states=())], "cuda", installed)
    assert len(asked) == 1


def test_explain_says_what_computes_prompts(tmp_path: Path) -> None:
    HYBRIDS["qwen3.5"]().save_pretrained(str(tmp_path))
    config = EngineConfig(source=ModelSource(model=str(tmp_path)), device="cpu", block_size=4, max_model_len=64)
    (note,) = [note for note in explain(config).notes if note.startswith("prompts: ")]
    assert note.startswith("prompts: the gated delta rule runs in torch: the device is cpu")
