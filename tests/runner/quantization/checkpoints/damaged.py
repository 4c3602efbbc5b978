"""Damages of small quantised checkpoints, drawn from a seed: each is refused by name, or the weights are right.

By hand, over many seeds: `python -m tests.runner.quantization.checkpoints.damaged 0 400`.
"""

from __future__ import annotations

import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from piecegraph.errors import ModelError
from piecegraph.runner.common.model_source import ModelSource
from piecegraph.runner.models.config.load_config import load_config
from piecegraph.runner.models.load import LoadedModel, load_model
from piecegraph.runner.quantization.checkpoints import experts, stored
from piecegraph.runner.quantization.experts import QuantisedExperts, of_expert, weights_of
from piecegraph.runner.quantization.methods.all_methods import METHODS
from piecegraph.runner.quantization.methods.linear_method import PackedWeight
from piecegraph.runner.quantization.modules import QuantisedLinear
from tests.runner.quantization.checkpoints.written import FORMATS, GPTQ, change_config, gptq, write_checkpoint
from tests.runner.quantization.expert_models import write_mixture, write_mxfp4

EXACT, ROUNDED = 1e-5, 1e-2
"""By how much weights may differ, relative to the largest; the second where scales were cast to 16 bits."""

MIXTURE = "W4A16 experts"
FILE = "model.safetensors"
NAMES = (*FORMATS, "GPTQ", "GPTQ 8 bits", "MXFP4", MIXTURE)


def write(name: str, folder: Path) -> PreTrainedModel:
    """Write a checkpoint, and return the model with the dequantised weights."""
    if name == "MXFP4":
        return write_mxfp4(folder)
    if name == MIXTURE:
        config, stores, _ = FORMATS["W4A16"]
        return write_mixture(folder, "mixtral", {**config, "ignore": ["lm_head", "re:.*gate$"]}, stores)
    if name.startswith("GPTQ"):
        bits = 8 if "8" in name else 4
        return write_checkpoint(folder, {**GPTQ, "bits": bits}, partial(gptq, bits=bits), leaves_one=False)
    config, stores, _ = FORMATS[name]
    return write_checkpoint(folder, config, stores)


SCALES = (".weight_scale", ".weight_scale_inv", ".scales", "_scales")
SUFFIXES = (
    *(*SCALES, ".weight_packed", ".weight_shape", ".weight_zero_point"),
    *(".qweight", ".qzeros", ".g_idx", "_blocks"),
)


@dataclass
class Damage:
    """What was done to a checkpoint."""

    what: str
    tensors: tuple[str, ...] = ()  # of which an error names one; none: a field of the config, or the file
    factor: float = 1.0  # what the damaged rows' weights are multiplied by
    bound: float = EXACT
    reads_nothing: bool = True  # a refusal comes before any weight is read


def damage(folder: Path, draw: random.Random) -> Damage:
    """Damage the checkpoint in a folder in one way."""
    tensors = load_file(folder / FILE)
    bases = {name[: -len(end)] for name in tensors for end in SUFFIXES if name.endswith(end)}
    names = sorted(name for name in tensors if name.endswith(SUFFIXES) or name.removesuffix(".weight") in bases)
    name = draw.choice(names)
    kind = draw.choice((_drop, _rename, _cast, _reshape, _numbers, _numbers, _order, _truncate, _config))
    found = kind(folder, tensors, name, draw)
    if kind not in (_truncate, _config):
        save_file({each: t.contiguous() for each, t in tensors.items()}, folder / FILE, metadata={"format": "pt"})
    return found


def _drop(folder: Path, tensors: dict[str, torch.Tensor], name: str, draw: random.Random) -> Damage:
    del tensors[name]
    return Damage(f"{name} is missing", (name,))


def _rename(folder: Path, tensors: dict[str, torch.Tensor], name: str, draw: random.Random) -> Damage:
    other = name + "s" if draw.random() < 0.5 else name.replace("layers.1", "layers.7").replace("layers.0", "layers.7")
    tensors[other] = tensors.pop(name)
    return Damage(f"{name} is called {other}", (name, other), reads_nothing=not name.endswith(".g_idx"))


def _cast(folder: Path, tensors: dict[str, torch.Tensor], name: str, draw: random.Random) -> Damage:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64]
    dtype = draw.choice([each for each in dtypes if each is not tensors[name].dtype])
    tensors[name] = tensors[name].float().to(dtype)
    return Damage(f"{name} is {dtype}", (name,), bound=ROUNDED)


def _reshape(folder: Path, tensors: dict[str, torch.Tensor], name: str, draw: random.Random) -> Damage:
    tensor = tensors[name]
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t[:-1],
        lambda t: torch.cat((t, t[:1])),
        lambda t: t[..., :1],
        lambda t: t.flatten(),
        lambda t: t.unsqueeze(0),
        lambda t: t.unsqueeze(-1),
        lambda t: t.flatten()[0],
        lambda t: t[:0],
        lambda t: torch.cat((t, t), -1),
    ]
    made = draw.choice(ways)(tensor).clone()
    tensors[name] = made
    return Damage(f"{name} is {list(made.shape)}, not {list(tensor.shape)}", (name,))


def _numbers(folder: Path, tensors: dict[str, torch.Tensor], name: str, draw: random.Random) -> Damage:
    scales = sorted(each for each in tensors if each.endswith(SCALES))
    name = draw.choice(scales)
    if tensors[name].dtype is torch.uint8:  # exponents
        more = draw.choice((1, 2, 255))
        tensors[name] = tensors[name].fill_(255) if more == 255 else tensors[name] + more
        return Damage(f"{name} has {more}", (name,), float("nan") if more == 255 else 2.0**more, reads_nothing=False)
    factor = draw.choice((0.0, -1.0, 2.0, float("nan"), float("inf"), float("-inf")))
    if factor - factor == 0:
        tensors[name] = tensors[name] * factor
    else:
        tensors[name].view(-1)[draw.randrange(tensors[name].numel())] = factor
    return Damage(f"{name} times {factor}", (name,), factor, reads_nothing=False)


def _order(folder: Path, tensors: dict[str, torch.Tensor], name: str, draw: random.Random) -> Damage:
    name = draw.choice(sorted(each for each in tensors if each.endswith((".g_idx", ".weight_shape"))) or [name])
    if not name.endswith((".g_idx", ".weight_shape")):
        return _drop(folder, tensors, name, draw)
    tensors[name] = tensors[name] + 1 if draw.random() < 0.5 else tensors[name].flip(0)
    return Damage(f"{name} is {tensors[name].tolist()[:4]}", (name,))


def _truncate(folder: Path, tensors: dict[str, torch.Tensor], name: str, draw: random.Random) -> Damage:
    content = (folder / FILE).read_bytes()
    kept = draw.randrange(len(content)) if draw.random() < 0.7 else draw.randrange(64)
    (folder / FILE).write_bytes(content[:kept])
    return Damage(f"{kept} of {len(content)} bytes")


_FIELDS = ("group_size", "bits", "num_bits", "strategy", "block_structure", "weight_block_size", "symmetric")
_VALUES: tuple[Any, ...] = (
    *(3, 8, 16, 12, 64, 0, -1, "16", None, [8, 8], [16, 16], [16], True, False, "channel", "group"),
)


def _config(folder: Path, tensors: dict[str, torch.Tensor], name: str, draw: random.Random) -> Damage:
    done: list[str] = []

    def change(written: dict[str, Any]) -> None:
        fields = written["quantization_config"]
        if "config_groups" in fields:
            fields = fields["config_groups"]["group_0"]["weights"]
        field = draw.choice([each for each in _FIELDS if each in fields] or ["modules_to_not_convert"])
        value = draw.choice(_VALUES) if field in _FIELDS else []
        done.append(f"{field} is {value}, not {fields.get(field)}")
        fields[field] = value

    change_config(folder, change)
    return Damage(done[0])


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Yield the paths of the modules whose weights are read."""
    read: list[str] = []
    plain = stored.read_weight

    def counting(checkpoint: Any, path: str, *others: Any) -> PackedWeight:
        read.append(path)
        return plain(checkpoint, path, *others)

    with mock.patch.object(stored, "read_weight", counting), mock.patch.object(experts, "read_weight", counting):
        yield read


def weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """Return the weights that quantised modules multiply by, by the names of the parameters in floats."""
    found = {}
    for path, module in loaded.model.named_modules():
        if isinstance(module, QuantisedLinear):
            packed = PackedWeight(values=module.weight_packed, scale=module.weight_scale, block=module.block)
            found[f"{path}.weight"] = METHODS[module.scheme].unpack(packed).float()
        elif isinstance(module, QuantisedExperts):
            for short in ("gate_up_proj", "down_proj"):
                stack = weights_of(module, short)
                each = [METHODS[module.scheme].unpack(of_expert(stack, place)) for place in range(len(stack.values))]
                found[f"{path}.{short}"] = torch.stack(each).float()
    return found


def check(name: str, seed: int, folder: Path) -> str:
    """Damage a checkpoint; raise `AssertionError` unless it is refused by name or right. Return which, and the damage.

    A refusal that needs no values comes before any weight is read.
    """
    reference = write(name, folder)
    done = damage(folder, random.Random(f"{name} {seed}"))
    with counted_reads() as read:
        loaded = _load(folder)
    if isinstance(loaded, ModelError):
        assert loaded.exit_code == 3
        assert any(_owner(each) in str(loaded) for each in done.tensors or ("",)), f"{done.what}: {loaded}"
        assert not (done.reads_nothing and read), f"{done.what}: {len(read)} weights were read before: {loaded}"
        return f"refused: {done.what}: {loaded}"
    found = weights(loaded)
    parameters = dict(reference.named_parameters())
    factor = done.factor
    assert factor - factor == 0, f"{done.what}: accepted"
    for each, weight in found.items():
        wanted = parameters[each].detach().float()
        if ".experts." in each and loaded.model.get_submodule(each.rpartition(".")[0]).is_transposed:
            wanted = wanted.transpose(1, 2)
        bound = done.bound * float(wanted.abs().max()) * max(1.0, abs(factor))
        if any(_is_damaged(each, tensor) for tensor in done.tensors):
            is_plain = torch.isclose(weight, wanted, rtol=0, atol=bound)  # as those of other experts are
            is_scaled = torch.isclose(weight, factor * wanted, rtol=0, atol=bound)
            assert bool((is_scaled | is_plain).all()), f"{done.what}: {each} is another"
            assert bool(is_scaled.all()) or ".experts." in each, f"{done.what}: {each} is another"
        else:
            assert torch.allclose(weight, wanted, rtol=0, atol=bound), f"{done.what}: {each} is another"
    return f"right: {done.what}"


def _load(folder: Path) -> LoadedModel | ModelError:
    source = ModelSource(model=str(folder))
    try:
        return load_model(source, load_config(source), dtype=torch.float32, device=torch.device("cpu"))
    except ModelError as error:
        return error


def _owner(tensor: str) -> str:
    """Return the part of a tensor's name that an error has to have: the module, under transformers' or its own name."""
    ends = [end for end in (*SUFFIXES, ".weight") if tensor.endswith(end)]
    return tensor[: -len(max(ends, key=len))] if ends else tensor


def _is_damaged(name: str, tensor: str) -> bool:
    path = _owner(tensor).replace("block_sparse_moe", "mlp")
    owner = name.removesuffix(".weight")
    return owner == path or (".experts." in name and path.startswith(owner.rpartition(".")[0]))


def main() -> None:
    first, last = (int(each) for each in sys.argv[1:3])
    results: Counter[str] = Counter()
    for seed in range(first, last):
        for name in sys.argv[3:] or NAMES:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    result = check(name, seed, Path(folder))
                except Exception as error:
                    result = f"FAILED: {name} {seed}: {type(error).__name__}: {error}"
                    traceback.print_exc(limit=-4)
                if "FAILED" in result or "-v" in sys.argv:
                    print(name, seed, result, flush=True)  # noqa: T201  a command
                results[result.partition(":")[0]] += 1
    print(dict(results), f"seeds {first} to {last - 1} of {len(NAMES)} formats")  # noqa: T201


if __name__ == "__main__":
    main()
