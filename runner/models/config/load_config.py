"""The config of a model, read through transformers and checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piecegraph.errors import ModelError, ModelNotFound
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.checkpoint.files import check_exists, check_generation_config, first_line, not_found
from piecegraph.runner.models.common.quiet_transformers import quiet_transformers
from piecegraph.runner.models.mechanisms.support import check_config, check_model_sizes
from piecegraph.runner.quantization.checkpoints.all_formats import stored_checkpoint
from piecegraph.runner.quantization.checkpoints.gguf_file import gguf_quantization

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def load_config(source: ModelSource) -> PreTrainedConfig:
    """Return the model's config, checked. Raises `ModelNotFound`, `ModelError` or `UnsupportedModel`."""
    from transformers import AutoConfig, PreTrainedConfig

    check_exists(source)
    check_generation_config(source)
    with quiet_transformers():
        try:
            written = None
            if not source.is_gguf:
                written, _ = PreTrainedConfig.get_config_dict(source.location, **source.options)
                written.update(source.hf_overrides)
            config: Any = AutoConfig.from_pretrained(source.location, **source.options)
            if source.hf_overrides:  # from_pretrained would drop fields that the class does not have
                config = _overridden(config, written, source.hf_overrides)
        except ValueError as error:
            is_cut = source.is_gguf and "support" not in str(error)  # else an architecture that is not known
            hint = ". It may be truncated: copy or download the file again." if is_cut else ""
            raise ModelError(f"{source.model!r}: {first_line(error)}{hint}") from error
        except OSError as error:
            if Path(source.location).is_dir():  # the folder exists, but cannot be read
                raise ModelError(f"the config of {source.model!r} cannot be read: {first_line(error)}") from error
            raise ModelNotFound(not_found(source, error)) from error
        except Exception as error:  # config classes check their fields with their own error types
            raise ModelError(f"the config of {source.model!r} is not valid: {first_line(error)}") from error
    assert isinstance(config, PreTrainedConfig), type(config)
    if source.is_gguf and hasattr(config, "quantization_config"):
        del config.quantization_config  # read into plain floats by transformers
    if source.is_gguf and source.keeps_blocks:
        config.quantization_config = gguf_quantization(Path(source.model))
    check_model_sizes(config)
    check_config(config, written)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None and stored_checkpoint(quantised) is None:
        del config.quantization_config  # of cached keys and values alone
    return config


def _overridden(
    config: PreTrainedConfig, written: Mapping[str, Any] | None, overrides: Mapping[str, Any]
) -> PreTrainedConfig:
    """Return the config rebuilt with `overrides`, each of which replaces a whole field."""
    fields = config.to_dict() if written is None else dict(written)
    return type(config).from_dict({**fields, **overrides})
