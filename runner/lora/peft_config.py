"""The file `adapter_config.json` of an adapter that peft wrote: what is read of it, and what is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piecegraph.errors import CheckpointError, UnsupportedModel

CONFIG_FILE = "adapter_config.json"

ALL_LINEAR = "all-linear"
"""The value of `target_modules` that means every linear layer but the output layer."""

INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""The values of `init_lora_weights` that leave the model's own weights as they are."""

_KNOWN = frozenset(
    {"alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config"}
    | {"exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"}
    | {"layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config"}
    | {"megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision"}
    | {"runtime_config", "target_modules", "task_type", "use_rslora"}
)
"""The fields that are read, or that say nothing about how an adapter is applied."""

_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA scales each row of the merged weights, which depends on all of them",
    "alora_invocation_tokens": "an activated LoRA (aLoRA) applies to a part of a prompt only",
    "lora_bias": "adapters with biases are not applied here",
    "modules_to_save": "it replaces whole modules of the model",
    "trainable_token_indices": "it replaces rows of the embedding",
    "target_parameters": "it changes parameters that belong to no linear layer, such as those of experts",
    "layer_replication": "it repeats layers of the model",
    "use_qalora": "QA-LoRA averages the inputs of its matrices",
    "ensure_weight_tying": "it applies one adapter to two modules that share their weights",
}
"""The fields that must be left out, false or empty, with the reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What an adapter's config says about its matrices."""

    folder: str  # for errors
    content: bytes  # of the file
    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    def rank_of(self, path: str) -> int:
        """Return the rank of the matrices of the module at `path`."""
        return int(_by_pattern(self.rank_pattern, path, self.rank))

    def scaling_of(self, path: str) -> float:
        """Return the number that the product of the matrices of the module at `path` is multiplied by."""
        alpha, rank = float(_by_pattern(self.alpha_pattern, path, self.alpha)), self.rank_of(path)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, path: str, *, is_output: bool, is_linear: bool) -> bool:
        """Return whether the adapter must have matrices for the module at `path`, by peft's rules.

        `is_output`: it is the model's output layer, which "all-linear" leaves out, like what is no linear layer.
        """
        if self.exclude_modules and _is_named(path, self.exclude_modules):
            return False
        if self.target_modules == ALL_LINEAR:
            return is_linear and not is_output
        if isinstance(self.target_modules, str):
            return _is_named(path, self.target_modules)
        if path in self.target_modules:
            return True
        return _is_named(path, self.target_modules) and self._is_in_layers(path)

    def _is_in_layers(self, path: str) -> bool:
        if not self.layers_to_transform:
            return True
        patterns = [rf"(?:^|.*?\.){each}\.(\d+)\." for each in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        for pattern in patterns:
            if (found := re.match(pattern, path)) is not None:  # the first number, as in peft
                return int(found.group(1)) in self.layers_to_transform
        return False


def read_config(folder: Path) -> AdapterConfig:
    """Return what the config of the adapter in `folder` says.

    Raises `CheckpointError` for a missing or damaged file, and `UnsupportedModel` for a field that cannot be applied
    here, by name.
    """
    content = _read(folder)
    written = _parse(folder, content)
    kind = str(written.get("peft_type", "")).upper().rpartition(".")[2]
    if kind != "LORA":
        raise UnsupportedModel(
            f"{folder}: peft_type={written.get('peft_type')!r}; only 'LORA' adapters can be applied."
        )
    _refuse_unsupported(folder, written)
    rank = written.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise CheckpointError(f"{folder}/{CONFIG_FILE}: r={rank!r}; it must be a whole number, 1 or more.")
    targets = written.get("target_modules")
    if not targets or not (isinstance(targets, str) or _is_strings(targets)):
        raise CheckpointError(
            f"{folder}/{CONFIG_FILE}: target_modules={targets!r}; it must be names of modules, a pattern, or "
            f"{ALL_LINEAR!r}."
        )
    return AdapterConfig(
        folder=str(folder),
        content=content,
        rank=rank,
        alpha=_number(folder, "lora_alpha", written.get("lora_alpha", 8)),
        use_rslora=bool(written.get("use_rslora", False)),
        rank_pattern={
            key: int(_number(folder, "rank_pattern", each)) for key, each in _pattern(folder, "rank_pattern", written)
        },
        alpha_pattern={
            key: _number(folder, "alpha_pattern", each) for key, each in _pattern(folder, "alpha_pattern", written)
        },
        target_modules=_names(folder, "target_modules", targets),
        exclude_modules=_names(folder, "exclude_modules", written.get("exclude_modules") or ()),
        layers_to_transform=_layers(folder, written.get("layers_to_transform")),
        layers_pattern=_as_tuple(written.get("layers_pattern") or ()),
    )


def _read(folder: Path) -> bytes:
    if not folder.is_dir():
        raise CheckpointError(f"the adapter {str(folder)!r} is not a folder; give the one with {CONFIG_FILE}.")
    file = folder / CONFIG_FILE
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}; is it the folder of an adapter?") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Copy the adapter again.") from error


def _parse(folder: Path, content: bytes) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    try:
        written = json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Copy the adapter again.") from error
    if not isinstance(written, dict):
        raise CheckpointError(f"{file} holds a {type(written).__name__}, not an object. Copy the adapter again.")
    return written


def _refuse_unsupported(folder: Path, written: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModel` for a field whose value changes how the adapter is applied."""

    def refuse(name: str, why: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{folder}: {name}={written[name]!r} is not available: {why}. Merge the adapter into the weights "
            "(peft's merge_and_unload), or train one without it."
        )

    for name, why in _REFUSED.items():
        if written.get(name) not in (None, False, [], {}, ""):
            raise refuse(name, why)
    if written.get("bias", "none") != "none":
        raise refuse("bias", "adapters with biases are not applied here")
    if not any(written.get("init_lora_weights", True) is each for each in (None, True, False)) and (
        written["init_lora_weights"] not in INITIALIZATIONS
    ):
        raise refuse("init_lora_weights", "such an initialization changes the model's own weights, too")
    for name, value in written.items():
        if name not in _KNOWN and name not in _REFUSED and value not in (None, False, [], {}, ""):
            raise refuse(name, "this version does not know the field")


def _by_pattern(patterns: Mapping[str, Any], path: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that is the end of `path`, by peft's rule."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return otherwise


def _is_named(path: str, names: str | tuple[str, ...]) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return path in names or any(path.endswith(f".{name}") for name in names)


def _pattern(folder: Path, name: str, written: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    patterns = written.get(name) or {}
    if not isinstance(patterns, Mapping):
        raise CheckpointError(f"{folder}/{CONFIG_FILE}: {name}={patterns!r}; it must be an object.")
    for pattern in patterns:
        _check_pattern(folder, name, pattern)
    return patterns.items()


def _names(folder: Path, name: str, written: Any) -> str | tuple[str, ...]:
    if isinstance(written, str):
        _check_pattern(folder, name, written)
        return written
    return _as_tuple(written)


def _check_pattern(folder: Path, name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"{folder}/{CONFIG_FILE}: {name} has {pattern!r}, no valid pattern: {error}.") from None


def _as_tuple(written: Any) -> tuple[str, ...]:
    return (written,) if isinstance(written, str) else tuple(map(str, written))


def _is_strings(written: Any) -> bool:
    return isinstance(written, list) and all(isinstance(each, str) for each in written)


def _layers(folder: Path, written: Any) -> tuple[int, ...]:
    if written is None:
        return ()
    layers = [written] if isinstance(written, int) else written
    if not isinstance(layers, list) or not all(type(each) is int for each in layers):
        raise CheckpointError(f"{folder}/{CONFIG_FILE}: layers_to_transform={written!r}; it must be numbers of layers.")
    return tuple(layers)


def _number(folder: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"{folder}/{CONFIG_FILE}: {name} has {value!r}; it must be a number above 0.")
    return value
