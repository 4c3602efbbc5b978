"""A backend is chosen by name, or as the best that can run the layers; the choice explains itself."""

from __future__ import annotations

import pytest
import torch

from piecegraph.errors import ConfigError, UnsupportedModel
from piecegraph.runner.attention.interface.backend import AttentionCGSupport
from piecegraph.runner.attention.select import AUTO, BACKENDS, WHY, choose_backend, load_backend
from piecegraph.runner.attention.triton.backend import TritonBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_every_entry_is_the_backend_of_that_name() -> None:
    for name in BACKENDS:
        assert load_backend(name).name == name


def test_auto_has_a_reason_for_every_candidate() -> None:
    assert set(WHY) == {(name, device) for device, names in AUTO.items() for name in names}


def test_auto_on_a_cpu_is_sdpa() -> None:
    choice = choose_backend("auto", [], CPU, 16)
    assert choice.backend.name == "sdpa"
    assert choice.reasons == ("sdpa: a CPU has torch's attention, and a kernel of ours for single tokens",)


def test_auto_says_why_the_better_one_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda *args: "heads of 7.")
    choice = choose_backend("auto", [], CUDA, 16)
    assert choice.backend.name == "sdpa"
    assert choice.reasons[0] == "not triton: heads of 7."
    assert choice.reasons[1].startswith("sdpa: the fallback")


def test_a_named_backend_that_cannot_run_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda *args: "heads of 7.")
    with pytest.raises(UnsupportedModel, match="attention backend 'triton': heads of 7. Use attention_backend='auto'"):
        choose_backend("triton", [], CUDA, 16)


def test_a_device_that_is_assumed_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the layers and the block size count there."""
    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda *args: "asked the device.")
    monkeypatch.setattr(
        TritonBackend, "layers_unsupported_reason", lambda self, layers, block_size: f"blocks of {block_size}."
    )
    assert choose_backend("auto", [], CUDA, 7, is_assumed=True).reasons[0] == "not triton: blocks of 7."
    with pytest.raises(UnsupportedModel, match="attention backend 'triton': blocks of 7. Use"):
        choose_backend("triton", [], CUDA, 7, is_assumed=True)


def test_the_backend_that_runs_is_the_fitted_one_with_its_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fitted(TritonBackend):
        notes = ("tuned for it",)

    monkeypatch.setattr(TritonBackend, "unsupported_reason", lambda *args: None)
    monkeypatch.setattr(TritonBackend, "fitted", lambda *args: Fitted())
    choice = choose_backend("triton", [], CUDA, 16)
    assert isinstance(choice.backend, Fitted)
    assert choice.reasons == ("triton: asked for by name; tuned for it",)
    assert not choice.is_fallback


def test_flash_attn_is_for_gpus_and_only_by_name() -> None:
    assert all("flash_attn" not in candidates for candidates in AUTO.values())
    with pytest.raises(UnsupportedModel, match="'flash_attn': its kernels run on NVIDIA GPUs, not on 'cpu'"):
        choose_backend("flash_attn", [], CPU, 16)


def test_an_unknown_backend_lists_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"attention_backend='spda' is unknown\. Did you mean 'sdpa'"):
        choose_backend("spda", [], CPU, 16)


def test_graph_support_is_ordered() -> None:
    """Each level includes those before it."""
    assert list(AttentionCGSupport) == sorted(AttentionCGSupport)
    assert AttentionCGSupport.NEVER < AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE < AttentionCGSupport.UNIFORM_BATCH
    assert AttentionCGSupport.UNIFORM_BATCH < AttentionCGSupport.ALWAYS
