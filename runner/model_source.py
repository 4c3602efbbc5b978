"""Which model is meant, and as what it is loaded; known before anything of weight is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piecegraph.errors import ConfigError, did_you_mean
from piecegraph.weight_files import weight_files

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from, and as what it is loaded."""

    model: str  # a folder, a .gguf file or a hub id
    revision: str | None = None
    trust_remote_code: bool = False
    load_format: str = "auto"
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.load_format not in LOAD_FORMATS:
            known = did_you_mean(self.load_format, LOAD_FORMATS)
            raise ConfigError(f"load_format={self.load_format!r} is unknown.{known}")
        if self.load_format == "gguf" and not self.is_gguf:
            raise ConfigError(f"load_format='gguf', but {self.model!r} is not a .gguf file.")

    @property
    def is_gguf(self) -> bool:
        return self.model.endswith(".gguf")

    @property
    def location(self) -> str:
        """What transformers calls `pretrained_model_name_or_path`."""
        return str(Path(self.model).parent) if self.is_gguf else self.model

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that every `from_pretrained` of this model takes."""
        options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.revision is not None:
            options["revision"] = self.revision
        if self.is_gguf:
            options["gguf_file"] = Path(self.model).name
        return options

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files on this machine that loading will read weights from; none for random weights."""
        return () if self.load_format == "dummy" else weight_files(self.model, self.revision)
