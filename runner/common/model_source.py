"""`ModelSource`, which names a model and how to load it without importing torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piecegraph.errors import ConfigError, did_you_mean, shorten
from piecegraph.weight_files import weight_files

MAX_NAME = 4096
"""The largest number of characters in a path on Linux (`PATH_MAX`)."""

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The location of a model and the options to load it with. Raises `ConfigError` for an invalid value."""

    model: str  # a folder, a .gguf file or a hub id
    revision: str | None = None
    trust_remote_code: bool = False
    load_format: str = "auto"
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    keeps_blocks: bool = False  # the blocks of a .gguf file stay quantised
    hidden_states: tuple[int, ...] = ()  # the places whose hidden states leave the model, for a head that drafts

    def __post_init__(self) -> None:
        for name in ("model", "revision", "load_format"):
            value = getattr(self, name)
            if name == "revision" and value is None:
                continue
            if not isinstance(value, str):
                raise ConfigError(f"{name}={value!r}; it must be a string.")
            if "\0" in value:
                raise ConfigError(f"{name}={shorten(value)!r} has a NUL character, which no path or name may have.")
        if len(self.model) > MAX_NAME:
            raise ConfigError(
                f"model={shorten(self.model)!r} has {len(self.model)} characters; a path or a name has at most "
                f"{MAX_NAME}."
            )
        if not isinstance(self.hf_overrides, Mapping):
            raise ConfigError(
                f"hf_overrides is of type {type(self.hf_overrides).__name__}; it must be a dictionary of fields of the "
                "model's config. A function is not called: its result may differ from start to start."
            )
        object.__setattr__(self, "hf_overrides", dict(self.hf_overrides))
        if self.load_format not in LOAD_FORMATS:
            known = did_you_mean(self.load_format, LOAD_FORMATS)
            raise ConfigError(f"load_format={self.load_format!r} is unknown.{known}")
        if self.load_format == "gguf" and not self.is_gguf:
            raise ConfigError(f"load_format='gguf', but {self.model!r} is not a .gguf file.")

    @property
    def is_gguf(self) -> bool:
        """Return whether the model is a .gguf file."""
        return self.model.endswith(".gguf")

    @property
    def location(self) -> str:
        """The argument that transformers calls `pretrained_model_name_or_path`."""
        return str(Path(self.model).parent) if self.is_gguf else self.model

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments for every `from_pretrained` call of this model."""
        options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.revision is not None:
            options["revision"] = self.revision
        if self.is_gguf:
            options["gguf_file"] = Path(self.model).name
        return options

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The local files that weights will be read from; none for random weights."""
        return () if self.load_format == "dummy" else weight_files(self.model, self.revision)
