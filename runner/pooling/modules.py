"""What a model of sentence-transformers does with a text's hidden states, read from modules.json and its folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from piecegraph.errors import CheckpointError, ModelError, UnsupportedModel
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.pooling.pool import PoolingType
from piecegraph.runner.pooling.task import model_file

_MODES: Mapping[str, PoolingType] = {
    "cls": PoolingType.CLS,
    "max": PoolingType.MAX,
    "mean": PoolingType.MEAN,
    "mean_sqrt_len_tokens": PoolingType.MEAN_SQRT_LEN,
    "weightedmean": PoolingType.WEIGHTED_MEAN,
    "lasttoken": PoolingType.LAST,
}
_FLAGS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The fields of earlier versions, one for each mode, in the order in which several modes are concatenated."""

_ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    "Identity": nn.Identity,
    "Tanh": nn.Tanh,
    "Sigmoid": nn.Sigmoid,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceModules:
    """The modules after the transformer."""

    pooling: tuple[PoolingType, ...]  # concatenated
    dense: tuple[nn.Module, ...] = ()  # applied to the pooled row, in order
    normalize: bool = False
    max_seq_length: int | None = None  # tokens of a text; longer ones are cut by sentence-transformers
    do_lower_case: bool = False


def sentence_modules(source: ModelSource) -> SentenceModules | None:
    """Return the modules of a sentence-transformers model; None if the model has no modules.json.

    Raises `ModelError` for files that cannot be read, `UnsupportedModel` for a module of another kind, and
    `CheckpointError` for weights that do not fit.
    """
    file = model_file(source, "modules.json")
    if file is None:
        return None
    modules = _json(file)
    if not isinstance(modules, list) or not all(
        isinstance(one, Mapping) and isinstance(one.get("type"), str) and isinstance(one.get("path"), str)
        for one in modules
    ):
        raise ModelError(f"{file} is no list of modules, each with a type and a path. Correct it.")
    pooling: tuple[PoolingType, ...] | None = None
    dense: list[nn.Module] = []
    normalize = False
    for module in modules:
        kind, path = module["type"].rpartition(".")[2], module["path"]
        if normalize and kind != "Normalize":
            raise UnsupportedModel(f"{file} has a {kind} after Normalize; Normalize must be the last module here.")
        if kind == "Transformer":
            if path:
                raise UnsupportedModel(
                    f"{file} has the transformer in the folder {path!r}; it must lie in the model's own folder. "
                    f"Load {path!r} as the model, with modules.json and the other modules' folders copied into it."
                )
        elif kind == "Pooling" and pooling is None:
            pooling = _pooling(source, path)
        elif kind == "Dense" and pooling is not None:
            dense.append(_dense(source, path))
        elif kind == "Normalize" and pooling is not None:
            normalize = True
        else:
            raise UnsupportedModel(
                f"{file} has a module {module['type']!r} that cannot run here, or not at this place; the modules are "
                "Transformer, Pooling, then any number of Dense, and Normalize last."
            )
    if pooling is None:
        raise UnsupportedModel(f"{file} has no Pooling module, so a text would have no single embedding.")
    settings = model_file(source, "sentence_bert_config.json")
    found = {} if settings is None else _object(settings)
    return SentenceModules(
        pooling=pooling,
        dense=tuple(dense),
        normalize=normalize,
        max_seq_length=_whole_number(settings, found, "max_seq_length"),
        do_lower_case=found.get("do_lower_case") is True,
    )


def _pooling(source: ModelSource, path: str) -> tuple[PoolingType, ...]:
    file = _module_file(source, path, "config.json")
    written = _object(file)
    if written.get("include_prompt") is False:
        raise UnsupportedModel(
            f"{file} has include_prompt=false: a text's instruction is not pooled, which cannot be told apart here."
        )
    modes = written.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if written.get(flag)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, Sequence) or not modes or not all(mode in _MODES for mode in modes):
        raise UnsupportedModel(f"{file} has pooling_mode={modes!r}; the modes are {', '.join(_MODES)}.")
    return tuple(_MODES[mode] for mode in modes)


def _dense(source: ModelSource, path: str) -> nn.Module:
    file = _module_file(source, path, "config.json")
    written = _object(file)
    for name, wanted in (("module_input_name", "sentence_embedding"), ("module_output_name", "sentence_embedding")):
        if written.get(name) not in (None, wanted):
            raise UnsupportedModel(f"{file} has {name}={written[name]!r}; a Dense takes and gives {wanted!r} here.")
    if written.get("use_residual"):
        raise UnsupportedModel(f"{file} has use_residual=true, which cannot run here.")
    sizes = [_whole_number(file, written, name) for name in ("in_features", "out_features")]
    if None in sizes:
        raise ModelError(f"{file} has in_features={sizes[0]} and out_features={sizes[1]}; both are needed.")
    activation = str(written.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{file} has the activation_function {written['activation_function']!r}; a Dense may have "
            f"{', '.join(_ACTIVATIONS)} here."
        )
    linear = nn.Linear(int(sizes[0] or 0), int(sizes[1] or 0), bias=written.get("bias") is not False)
    _load(linear, source, path)
    return nn.Sequential(linear, _ACTIVATIONS[activation]()).eval().requires_grad_(False)


def _load(linear: nn.Linear, source: ModelSource, path: str) -> None:
    """Read the weights of a Dense module into `linear`."""
    if source.load_format == "dummy":
        return
    file = model_file(source, f"{path}/model.safetensors")
    if file is None:
        raise CheckpointError(
            f"the module {path!r} of {source.model!r} has no model.safetensors; pickled weights (pytorch_model.bin) "
            "are not read. Save the model again with sentence-transformers, which writes safetensors."
        )
    from safetensors.torch import load_file

    try:
        tensors = load_file(str(file))
        linear.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in tensors.items()})
    except Exception as error:  # a damaged file may raise anything
        line = " ".join(str(error).split())
        raise CheckpointError(
            f"the weights of the module {path!r} of {source.model!r} cannot be read: {line}"
        ) from error


def _module_file(source: ModelSource, path: str, name: str) -> Path:
    file = model_file(source, f"{path}/{name}")
    if file is None:
        raise ModelError(f"modules.json of {source.model!r} names the module {path!r}, which has no {name}.")
    return file


def _object(file: Path) -> Mapping[str, Any]:
    found = _json(file)
    if not isinstance(found, Mapping):
        raise ModelError(f"{file} holds a {type(found).__name__}; an object is needed. Correct it.")
    return found


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{file} is not valid JSON ({line}). Correct it.") from error


def _whole_number(file: Path | None, written: Mapping[str, Any], name: str) -> int | None:
    value = written.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ModelError(f"{file} has {name}={value!r}; it must be a whole number, 1 or more.")
    return value
