"""The weights of a head: read from its checkpoint, and where that has none, the model's own embedding and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from piecegraph.compiler.repeated_layers.find import name_layers
from piecegraph.errors import CheckpointError
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.checkpoint.tensors import refuse_tensors
from piecegraph.runner.models.common.quiet_transformers import quiet_transformers
from piecegraph.runner.models.load import LoadedModel, load_model
from piecegraph.runner.models.without_weights import make_fake
from piecegraph.runner.speculative.heads.eagle3 import Eagle3Head
from piecegraph.runner.speculative.heads.head_config import Eagle3Config, HeadConfig, MtpConfig
from piecegraph.runner.speculative.heads.mtp import MtpHead, mtp_head

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NOT_READ = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors of a checkpoint that only training reads."""


HEAD_DIMS = {
    "input_ids": {0: "num_tokens"},
    "positions": {0: "num_tokens"},
    "hidden_states": {0: "num_tokens"},
    "logits_indices": {0: "num_logits"},
}
"""The dims of a head's arguments that vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadModel(LoadedModel):
    """A head on its device, which is traced over tokens, positions and hidden states."""

    state_size: int  # of a hidden state

    def forward_module(self) -> nn.Module:
        """Return the head itself."""
        return self.model

    @property
    def num_parameters(self) -> int:
        """The number of parameters, without those that are certainly the model's."""
        model: Any = self.model
        own = model.mtp.layers if isinstance(model, MtpHead) else model
        return sum(parameter.numel() for parameter in own.parameters())

    @property
    def dynamic_dims(self) -> Mapping[str, Mapping[int, str]]:
        """The dims of the arguments of the head that vary."""
        return HEAD_DIMS

    def example_inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return inputs to trace the head with; the trace does not depend on their sizes."""
        positions = torch.arange(8, device=device)
        hidden = torch.zeros(8, self.state_size, dtype=self.dtype, device=device)
        return torch.zeros_like(positions), positions, hidden, torch.tensor([2, 4, 7], device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedHead:
    """A head with its weights."""

    loaded: HeadModel
    target_ids: torch.Tensor | None  # [draft_vocab_size] int64: the model's token of each of the head's; None: the same
    notes: tuple[str, ...]


def load_eagle3(config: Eagle3Config, target: LoadedModel, *, seed: int) -> LoadedHead:
    """Return the head with the weights of its source, in the model's dtype and on its device.

    Tensors that the checkpoint lacks because they are the model's are shared with it: the embedding, and the matrix of
    logits of a head with the whole vocabulary. Raises `CheckpointError` for tensors that are missing, unknown or of
    another shape, and for a `d2t` that names no token of the model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head: Any = Eagle3Head(config)
    head = head.to(target.dtype).eval().requires_grad_(False)
    is_random = config.source.load_format == "dummy"
    state = {} if is_random else _read_state(config.source)
    d2t = state.pop("d2t", None)
    for name in _NOT_READ:
        state.pop(name, None)
    shared = _share(head, state, config, target)
    _fill(head, state, config, shared, is_random=is_random)
    head = head.to(target.device)
    name_layers(head)
    notes = (str(config), *([f"head: {' and '.join(shared)} of the model itself"] if shared else ()))
    loaded = _head_model(head, config, target.dtype, target.device, notes)
    return LoadedHead(loaded=loaded, target_ids=_target_ids(d2t, config, target.device), notes=notes)


def load_mtp(config: MtpConfig, target: LoadedModel, *, seed: int) -> LoadedHead:
    """Return the layer for multi-token prediction with its weights, in the model's dtype and on its device.

    transformers reads it; embedding and logits are the model's. Raises `CheckpointError` for tensors that are missing.
    """
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = mtp_head(target.model, is_random=config.source.load_format == "dummy")
    head = head.to(target.dtype).to(target.device).eval().requires_grad_(False)
    notes = (str(config),)
    return LoadedHead(
        loaded=_head_model(head, config, target.dtype, target.device, notes), target_ids=None, notes=notes
    )


def head_on_meta(config: HeadConfig, hf_config: PreTrainedConfig, dtype: torch.dtype) -> HeadModel:
    """Return the head with meta tensors, which can be traced. `hf_config`: the model's."""
    meta = torch.device("meta")
    if isinstance(config, MtpConfig):
        source = replace(config.source, load_format="dummy")
        target = load_model(source, hf_config, dtype=dtype, device=meta).model
        with quiet_transformers(), meta:
            head: Any = mtp_head(target, is_random=True)
    else:
        with meta:
            head = Eagle3Head(config)
        name_layers(head)
    head = head.to(dtype).eval().requires_grad_(False)
    return _head_model(head, config, dtype, meta, (str(config),))


def head_without_weights(
    config: HeadConfig, hf_config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> HeadModel:
    """Return the head with fake tensors, which can be traced and compiled. `hf_config`: the model's."""
    loaded = head_on_meta(config, hf_config, dtype)
    make_fake(loaded.model, device)
    return replace(loaded, device=device)


def _head_model(
    head: Any, config: HeadConfig, dtype: torch.dtype, device: torch.device, notes: tuple[str, ...]
) -> HeadModel:
    return HeadModel(
        model=head,
        config=head.config,
        dtype=dtype,
        device=device,
        first_position=0,
        notes=notes,
        state_size=config.state_size,
    )


def _read_state(source: ModelSource) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for file in source.weight_files:
        try:
            state |= load_file(str(file))
        except Exception as error:  # safetensors' own, or the operating system's
            raise CheckpointError(f"{file} cannot be read: {error}. Copy or download it again.") from error
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}


def _share(
    head: Any, state: Mapping[str, torch.Tensor], config: Eagle3Config, target: LoadedModel
) -> dict[str, nn.Parameter]:
    """Replace parameters that only the model has by the model's own, and return them by their names in the head."""
    model: Any = target.model
    shared: dict[str, nn.Parameter] = {}
    wanted = {
        "embed_tokens": model.get_input_embeddings(),
        "lm_head": model.get_output_embeddings() if config.draft_vocab_size == config.vocab_size else None,
    }
    for name, module in wanted.items():
        own = getattr(head, name)
        if f"{name}.weight" in state or module is None or module.weight.shape != own.weight.shape:
            continue
        own.weight = shared[f"{name}.weight"] = module.weight
    return shared


def _fill(
    head: nn.Module,
    state: Mapping[str, torch.Tensor],
    config: Eagle3Config,
    shared: Mapping[str, nn.Parameter],
    *,
    is_random: bool,
) -> None:
    """Write the tensors of the checkpoint into the head's. Raises `CheckpointError`."""
    if is_random:
        return
    own = {name: tensor for name, tensor in head.state_dict().items() if name not in shared}
    refuse_tensors(
        config.source,
        missing=own.keys() - state.keys(),
        unexpected=state.keys() - own.keys(),
        mismatched=[
            (name, state[name].shape, own[name].shape)
            for name in own.keys() & state.keys()
            if state[name].shape != own[name].shape
        ],
        owner="head",
    )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


def _target_ids(d2t: torch.Tensor | None, config: Eagle3Config, device: torch.device) -> torch.Tensor | None:
    """Return the model's token of each token of the head. `d2t` holds what is to be added to the head's."""
    if d2t is None:
        if config.draft_vocab_size == config.vocab_size:
            return None
        if config.source.load_format == "dummy":
            return torch.arange(config.draft_vocab_size, device=device)
        raise CheckpointError(
            f"{config.source.model!r} has no tensor d2t, and without it the {config.draft_vocab_size} tokens of the "
            f"head are not known among the model's {config.vocab_size}."
        )
    if d2t.shape != (config.draft_vocab_size,) or d2t.is_floating_point():
        raise CheckpointError(
            f"{config.source.model!r}: d2t is {tuple(d2t.shape)} of {d2t.dtype}; it must hold a whole number for each "
            f"of the head's {config.draft_vocab_size} tokens."
        )
    ids = torch.arange(config.draft_vocab_size) + d2t.long().cpu()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or ids.unique().numel() != ids.numel():
        raise CheckpointError(
            f"{config.source.model!r}: d2t maps the head's tokens to {int(ids.min())} to {int(ids.max())}, not to "
            f"different tokens of the model's 0 to {config.vocab_size - 1}."
        )
    return ids.to(device)
