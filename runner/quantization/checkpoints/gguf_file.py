"""A GGUF file whose blocks stay quantised: its tensors under transformers' names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piecegraph.errors import ModelError, UnsupportedModel
from piecegraph.runner.quantization.checkpoints.gguf_blocks import KINDS, GgufBlocks

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader, ReaderTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""llama.cpp's names of the architectures whose tensors are known here."""

_FLOATS = ("F32", "F16", "BF16")

_OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_quantization(file: Path) -> dict[str, Any]:
    """Return the `quantization_config` of a file's blocks: the kind of each module's. Raises `UnsupportedModel`."""
    blocks, has_float_head = {}, False
    for tensor in _reader(file).tensors:
        path, _, suffix = _transformers_name(tensor.name, file).rpartition(".")
        is_float = tensor.tensor_type.name in _FLOATS
        if suffix == "weight" and not is_float:
            blocks[path] = tensor.tensor_type.name
        has_float_head = has_float_head or (path == "lm_head" and is_float)
    if not blocks:
        raise UnsupportedModel(f"{str(file)!r} has no quantised blocks; leave quantization out.")
    return {"quant_method": GgufBlocks.quant_method, "blocks": blocks, "has_float_head": has_float_head}


def gguf_tensors(file: Path) -> Mapping[str, Any]:
    """Return the tensors of a file by transformers' names, those with blocks as `.weight_blocks`, uint8.

    Each is read when it is indexed. Rows of queries and keys are in transformers' order of rotated pairs.
    """
    reader = _reader(file)
    architecture = reader.get_field("general.architecture")
    assert architecture is not None, "checked with the names"
    heads = {}
    if architecture.contents() == "llama":
        for kind, name in (("attn_q", "head_count"), ("attn_k", "head_count_kv")):
            field = reader.get_field(f"llama.attention.{name}")
            heads[kind] = None if field is None else int(field.contents())
    found: dict[str, Any] = {}
    for tensor in reader.tensors:
        name = _transformers_name(tensor.name, file)
        if not name:
            continue
        kind = tensor.name.split(".")[-2]
        found[name + ("_blocks" if tensor.tensor_type.name in KINDS else "")] = _Stored(tensor, heads.get(kind))
    return found


class _Stored:
    """A tensor of the file, as transformers reads one."""

    def __init__(self, tensor: ReaderTensor, num_heads: int | None) -> None:
        self._tensor, self._num_heads = tensor, num_heads

    def get_dtype(self) -> str:
        return "F32" if self._tensor.tensor_type.name not in KINDS else "U8"

    def get_shape(self) -> list[int]:
        """Return the shape; of blocks, the rows and the bytes of a row."""
        stored = self._tensor
        kept = stored.data.shape if stored.tensor_type.name in KINDS else reversed(stored.shape.tolist())
        return [int(size) for size in kept]

    def __getitem__(self, index: object) -> torch.Tensor:
        import torch
        from gguf import dequantize

        stored = self._tensor
        data = stored.data if stored.tensor_type.name in KINDS else dequantize(stored.data, stored.tensor_type)
        rows: torch.Tensor = torch.from_numpy(data.copy())
        if self._num_heads is None:
            return rows
        pairs: torch.Tensor = rows.unflatten(
            0, (self._num_heads, -1, 2)
        )  # llama.cpp has the two rows of a pair side by side
        return pairs.transpose(1, 2).reshape(rows.shape)


def _transformers_name(name: str, file: Path) -> str:
    """Return transformers' name of a tensor, or "" for one that is computed there. Raises `UnsupportedModel`."""
    kind, _, suffix = name.rpartition(".")
    if kind == "rope_freqs":
        return ""
    if kind in _OUTSIDE_LAYERS:
        return f"{_OUTSIDE_LAYERS[kind]}.{suffix}"
    layer, _, kind = kind.rpartition(".")
    if layer.startswith("blk.") and kind in _IN_A_LAYER:
        return f"model.layers.{layer.removeprefix('blk.')}.{_IN_A_LAYER[kind]}.{suffix}"
    raise UnsupportedModel(
        f"{str(file)!r} has the tensor {name!r}, which is not known with quantization='gguf'; leave that out, so that "
        "the file is read into floats."
    )


def _reader(file: Path) -> GGUFReader:
    """Return the reader of a file, the same while it does not change. Raises `UnsupportedModel` and `ModelError`."""
    stat = file.stat()
    return _opened(file, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=1)  # reading the tokens of a header takes seconds
def _opened(file: Path, modified: int, size: int) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError("a GGUF file is read through package gguf, not installed here: pip install gguf") from error
    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ModelError(f"{str(file)!r} cannot be read: {error}. Copy or download the file again.") from error
    field = reader.get_field("general.architecture")
    architecture = None if field is None else field.contents()
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{str(file)!r} has the architecture {architecture!r}, whose blocks cannot stay as they are here; those "
            f"that can are {', '.join(ARCHITECTURES)}. Leave quantization out, so that the file is read into floats."
        )
    return reader
