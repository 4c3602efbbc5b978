"""A model from a folder, a GGUF file or a hub id, through transformers' own loading."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from piecegraph.compiler.layer_names import name_layers
from piecegraph.errors import CheckpointError, ConfigError, ModelError, ModelNotFound, UnsupportedModel, did_you_mean
from piecegraph.progress import OnPhase, Phase
from piecegraph.runner.attention.transformers_attention import (
    ATTENTION_IMPLEMENTATION,
    register_attention,
)
from piecegraph.runner.model_source import ModelSource
from piecegraph.runner.model_support import check_class, check_config
from piecegraph.runner.quiet_transformers import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    model: PreTrainedModel  # in eval mode, on its device, no gradients
    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    notes: tuple[str, ...]


def load_config(source: ModelSource) -> PreTrainedConfig:
    """The model's config, checked. Raises `ModelNotFound`, `ModelError` or `UnsupportedModel`."""
    from transformers import AutoConfig, PreTrainedConfig

    _check_exists(source)
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
            raise ModelError(f"{source.model!r}: {_first_line(error)}") from error
        except OSError as error:
            raise ModelNotFound(_not_found(source, error)) from error
        except Exception as error:  # config classes check their fields with an error type of their own
            raise ModelError(f"the config of {source.model!r} is not valid: {_first_line(error)}") from error
    assert isinstance(config, PreTrainedConfig), type(config)
    if source.is_gguf and hasattr(config, "quantization_config"):
        del config.quantization_config  # read into plain floats by transformers
    check_config(config, written)
    return config


def resolve_device(device: str | torch.device | None) -> torch.device:
    """`device`, or the GPU if there is one, else the CPU. Raises `ConfigError`."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is not a device; e.g. 'cpu' or 'cuda'.") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={device!r}, but torch sees no NVIDIA GPU. Use device='cpu', or install a CUDA build."
        )
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r} cannot run here; use 'cpu' or 'cuda'.")
    if resolved.type == "cuda" and resolved.index not in (None, current := torch.cuda.current_device()):
        raise ConfigError(
            f"device={device!r}, but this process's current GPU is cuda:{current}, where kernels are launched. Call "
            f"torch.cuda.set_device({resolved.index}) first, or show the process that GPU alone: "
            f"CUDA_VISIBLE_DEVICES={resolved.index}."
        )
    return resolved


def resolve_dtype(dtype: str | torch.dtype, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype weights are loaded as. `"auto"`: float32 on the CPU; on a GPU the checkpoint's if it has
    16 bits, else bfloat16. Raises `ConfigError` on any other name.
    """
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES.values():
            raise ConfigError(f"dtype={dtype} cannot run here; use float32, bfloat16 or float16.")
        return dtype
    if dtype == "auto":
        stored = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype
        if device.type == "cpu":
            return torch.float32
        return stored if stored in (torch.bfloat16, torch.float16) else torch.bfloat16
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is unknown.{did_you_mean(dtype, ['auto', *DTYPES])}")
    return DTYPES[dtype]


def load_model(
    source: ModelSource,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    on_phase: OnPhase | None = None,
) -> LoadedModel:
    """The model with our attention, from `source`, or with random weights if its format is `dummy`.

    Raises:
        UnsupportedModel: the class cannot work; nothing was read.
        CheckpointError: files missing or corrupt, or tensors missing, unexpected or of another shape.
    """
    from transformers import PreTrainedModel

    started = time.monotonic()
    if on_phase is not None:
        on_phase(Phase(name="load", detail=source.model))

    def on_weights(done: int, total: int) -> None:
        if on_phase is not None:
            on_phase(Phase(name="load", done=done, total=total, detail=source.model))

    register_attention()
    known_class = _known_class(config)
    if known_class is not None:
        check_class(known_class)
    with quiet_transformers(on_weights):
        if source.load_format == "dummy":
            model = _random_model(source, config, dtype, device, seed)
        else:
            model = _checkpoint_model(source, config, dtype)
    assert isinstance(model, PreTrainedModel), type(model)
    check_class(type(model))
    model = model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]  # transformers decorates .to
    name_layers(model)
    if on_phase is not None:
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        detail = f"{type(model).__name__}, {num_parameters / 1e6:.1f}M parameters, {dtype} on {device}"
        on_phase(Phase(name="load", seconds=time.monotonic() - started, detail=detail.replace("torch.", "")))
    return LoadedModel(model=model, config=model.config, dtype=dtype, device=device, notes=())


def load_tokenizer(source: ModelSource, tokenizer: str | None = None) -> PreTrainedTokenizerBase:
    """The model's tokenizer, or the one at `tokenizer`. Raises `ModelError` if there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    options = source.options if tokenizer is None else {"trust_remote_code": source.trust_remote_code}
    with quiet_transformers():
        try:
            loaded = AutoTokenizer.from_pretrained(tokenizer or source.location, **options)
        except Exception as error:  # whatever a broken or absent tokenizer makes transformers raise
            raise ModelError(
                f"no usable tokenizer at {tokenizer or source.model!r} ({_first_line(error)}). "
                "Name one with tokenizer=..., or pass token ids with skip_tokenizer_init=True."
            ) from error
    assert isinstance(loaded, PreTrainedTokenizerBase), type(loaded)
    return loaded


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a text, by the model's generation config."""
    generation_config = model.generation_config
    eos = generation_config.eos_token_id if generation_config is not None else None
    if eos is None:
        eos = model.config.get_text_config(decoder=True).eos_token_id
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def _overridden(
    config: PreTrainedConfig, written: Mapping[str, Any] | None, overrides: Mapping[str, Any]
) -> PreTrainedConfig:
    """`config` made again with `overrides`; a value replaces the whole field."""
    fields = config.to_dict() if written is None else dict(written)
    return type(config).from_dict({**fields, **overrides})


def _checkpoint_model(source: ModelSource, config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    options = dict(source.options)
    if source.load_format == "safetensors":
        options["use_safetensors"] = True
    check_weight_files(source)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.location,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_IMPLEMENTATION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # collected, and refused below with the rest
            **options,
        )
    except (SafetensorError, EOFError) as error:
        raise CheckpointError(f"a weight file of {source.model!r} is corrupt: {_first_line(error)}") from error
    except OSError as error:
        raise CheckpointError(f"no weights to read at {source.model!r}: {_first_line(error)}") from error
    except (RuntimeError, ValueError, ImportError) as error:
        raise CheckpointError(f"the weights of {source.model!r} cannot be read: {_first_line(error)}") from error
    model, info = loaded
    _check_loading_info(source, info)
    return model


def _random_model(
    source: ModelSource, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> Any:
    from transformers import AutoModelForCausalLM

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=ATTENTION_IMPLEMENTATION,
            trust_remote_code=source.trust_remote_code,
        )


def _known_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class transformers would build; None when only the model's own code knows."""
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if hasattr(config, "auto_map"):
            return None
        raise UnsupportedModel(
            f"{type(config).__name__} (model_type {config.model_type!r}) has no causal language model in transformers."
        )
    known = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return known if isinstance(known, type) and issubclass(known, PreTrainedModel) else None


def _check_exists(source: ModelSource) -> None:
    path = Path(source.model)
    if source.is_gguf:
        if not path.is_file():
            raise ModelNotFound(f"no file {source.model!r}.")
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise CheckpointError(f"{source.model!r} is not a GGUF file (it does not begin with 'GGUF').")
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"the folder {source.model!r} has no config.json, so it is not a model.")
    elif path.is_absolute() or source.model.startswith((".", "~")) or source.model.count("/") > 1:
        raise ModelNotFound(f"no folder {source.model!r}. Give a model folder, a .gguf file or a hub id (owner/name).")


def check_weight_files(source: ModelSource) -> None:
    """Open every local weight file: a truncated one fails here, by name, and costs a header's read. Raises
    `CheckpointError`, also for a folder that has none."""
    from safetensors import SafetensorError, safe_open

    folder = Path(source.location)
    if source.load_format == "dummy" or source.is_gguf or not folder.is_dir():
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files and not any(folder.glob("*.bin")):
        raise CheckpointError(f"no weights to read at {source.model!r}: the folder has no .safetensors or .bin file.")
    for file in files:
        try:
            with safe_open(str(file), framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} is corrupt or truncated ({_first_line(error)}). Copy or download the file again."
            ) from error


def _check_loading_info(source: ModelSource, info: Mapping[str, Any]) -> None:
    missing = sorted(info["missing_keys"])
    unexpected = sorted(info["unexpected_keys"])
    mismatched = sorted(
        f"{name} (checkpoint {tuple(found)}, model {tuple(wanted)})" for name, found, wanted in info["mismatched_keys"]
    )
    problems = [
        f"{len(names)} {what}: {_shorten(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the weights of {source.model!r} do not fit its config; tensors {'; '.join(problems)}. "
            "Check that config.json belongs to these weights."
        )


def _shorten(names: list[str], limit: int = 20) -> str:
    more = f", ... and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _not_found(source: ModelSource, error: OSError) -> str:
    return (
        f"no model {source.model!r}: it is no folder here, and the hub gave none ({_first_line(error)}). "
        "Check the name; offline (HF_HUB_OFFLINE) only models already downloaded are found."
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
