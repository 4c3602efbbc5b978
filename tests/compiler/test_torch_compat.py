"""What one torch has and another has not."""

from __future__ import annotations

import pytest
import torch

from piecegraph.compiler.torch_compat import allocator_settings


def test_a_torch_that_does_not_tell_was_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert allocator_settings() == ""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert allocator_settings() == "max_split_size_mb:512"
