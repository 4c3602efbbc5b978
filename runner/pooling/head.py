"""The head of a classifier over pooled rows: the model's own code, with the part below it replaced by given rows.

transformers' classifiers take the hidden states of whole texts, and pick or average rows themselves. Here a text is one
row by then, so the head is run on texts of one token. Which row that is (the first, the last or the mean) is found by
running the model's own head on several rows, and comparing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from piecegraph.errors import UnsupportedModel
from piecegraph.runner.pooling.pool import PoolingType, pool

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NUM_ROWS = 5
_CANDIDATES = (PoolingType.CLS, PoolingType.LAST, PoolingType.MEAN)

Activation = Callable[[torch.Tensor], torch.Tensor]


class ClassifierHead(nn.Module):
    """Logits `[num_seqs, num_labels]` of pooled rows `[num_seqs, hidden_size]`."""

    def __init__(self, model: Any) -> None:
        """Take the part below the head out of `model`, which cannot be called by itself afterwards."""
        super().__init__()
        backbone = getattr(model, model.base_model_prefix)
        self._rows = _GivenRows(backbone)
        setattr(model, model.base_model_prefix, self._rows)
        self._model = model
        self._dtype = model.dtype
        if model.config.get_text_config().pad_token_id is None:
            model.config.get_text_config().pad_token_id = 0  # texts of one token have no padding, whatever it is
        pad = model.config.get_text_config().pad_token_id
        self._token = 1 if pad == 0 else 0  # any but padding
        self.pooling = self._find_pooling()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits in float32."""
        return self._own(rows[:, None].to(self._dtype)).float()

    def _own(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the logits of the model's own code for the hidden states `[num_seqs, seq_len, hidden_size]`."""
        input_ids = torch.full(
            hidden_states.shape[:2], self._token, dtype=torch.int64, device=hidden_states.device
        )  # no padding: every row counts
        self._rows.hidden_states = hidden_states
        try:
            logits: torch.Tensor = self._model(input_ids=input_ids).logits
        finally:
            self._rows.hidden_states = None
        return logits

    def _find_pooling(self) -> PoolingType:
        """Return the row that the model's own head reads. Raises `UnsupportedModel` if it is another one."""
        name, device = type(self._model).__name__, self._model.device
        generator = torch.Generator().manual_seed(0)
        size = self._model.config.get_text_config().hidden_size
        hidden_states = torch.randn(_NUM_ROWS, size, generator=generator).to(device)
        bounds = torch.tensor([0, _NUM_ROWS], device=device)
        num_labels = self._model.config.num_labels
        try:
            with torch.no_grad():
                wanted = self._own(hidden_states[None].to(self._dtype)).float()
                found = {kind: self(pool(hidden_states, bounds, [kind])) for kind in _CANDIDATES}
        except Exception as error:  # whatever a head raises that reads something else than hidden states
            line = next(iter(str(error).splitlines()), "")
            raise UnsupportedModel(
                f"the head of {name} cannot run on rows of hidden states alone: {type(error).__name__}: {line}"
            ) from error
        exact = 1e-5 if self._dtype is torch.float32 else 5e-2
        for kind, logits in found.items():
            if logits.shape == wanted.shape == (1, num_labels) and torch.allclose(logits, wanted, exact, exact):
                return kind
        raise UnsupportedModel(
            f"the head of {name} reads another row than the first token's, the last token's or their mean, so "
            "its logits cannot be computed from one row of a text."
        )


class _GivenRows(nn.Module):
    """A stand-in for the part below the head, which returns given hidden states."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.hidden_states: torch.Tensor | None = None
        self.pooler: Any = getattr(backbone, "pooler", None)
        self.pooler_activation: Any = getattr(backbone, "pooler_activation", None)
        self.config: Any = getattr(backbone, "config", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the part below the head would return."""
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        hidden_states: Any = self.hidden_states
        assert hidden_states is not None, "the part below a classifier's head is called by the compiled model only"
        pooled = None
        if self.pooler is not None and self.pooler_activation is not None:
            pooled = self.pooler_activation(self.pooler(hidden_states[:, 0]))
        elif self.pooler is not None:
            pooled = self.pooler(hidden_states)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden_states, pooler_output=pooled)


def classifier_activation(config: PreTrainedConfig) -> Activation:
    """Return the function from logits to probabilities [vLLM's rules].

    A cross-encoder of sentence-transformers may name one; else `problem_type` of the config decides, and without it the
    number of labels: sigmoid for one, softmax for several.

    Raises `UnsupportedModel` for a function of another name.
    """
    written = getattr(config, "sentence_transformers", None)
    name = written.get("activation_fn") if isinstance(written, dict) else None
    name = name or getattr(config, "sbert_ce_default_activation_function", None)
    if name is not None:
        known: dict[str, Activation] = {"Sigmoid": torch.sigmoid, "Identity": _identity, "Softmax": _softmax}
        short = str(name).rpartition(".")[2]
        if short not in known:
            raise UnsupportedModel(f"the config names the activation {name!r}; it may be {', '.join(known)} here.")
        return known[short]
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return _identity
    if problem == "multi_label_classification" or (problem is None and num_labels(config) < 2):
        return torch.sigmoid
    return _softmax


def num_labels(config: PreTrainedConfig) -> int:
    """Return the number of classes."""
    return int(config.num_labels or 0)


def _identity(logits: torch.Tensor) -> torch.Tensor:
    return logits


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)
