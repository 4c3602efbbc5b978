"""The key of a plan: everything that is known before a trace and may influence the compile."""

from __future__ import annotations

from typing import Any

import torch

from piecegraph.cache.store.keys import EXCLUDED, config_factors
from piecegraph.compiler.keys.machine_factors import build_factors, machine_factors, settings_factors, version_of
from piecegraph.compiler.keys.model_factors import model_factors
from piecegraph.compiler.keys.own_sources import PLAN_SOURCES
from piecegraph.compiler.plans.plan_format import PLAN_FORMAT
from piecegraph.compiler.torch_compat.process_settings import tracing_settings
from piecegraph.compiler.tracing.class_factors import patched_methods
from piecegraph.compiler.tracing.signature import ConstantLeaf, ExampleCall, TensorLeaf
from piecegraph.config import CompileConfig
from piecegraph.errors import KeyFactorError
from piecegraph.passes.matching.graph_pass import GraphPass


def plan_factors(module: torch.nn.Module, call: ExampleCall, config: CompileConfig) -> dict[str, Any]:
    """Return the key factors of a plan. Raises `KeyFactorError`, naming the value that no key can be made of."""
    is_of_transformers = any(
        base.__module__.startswith("transformers.") for each in module.modules() for base in type(each).__mro__
    )
    return {
        "kind": "plan",
        "format": PLAN_FORMAT,
        "build": {
            **build_factors(PLAN_SOURCES),
            "transformers": version_of("transformers") if is_of_transformers else None,
        },
        "machine": machine_factors(device_of(module)),
        "settings": {**settings_factors(), **tracing_settings()},
        "config": {
            **config_factors(config, {**EXCLUDED, "passes": "written below, by source"}),
            "passes": None if config.passes is None else [_pass_factor(each) for each in config.passes],
        },
        "inputs": {leaf.path: _leaf_factor(leaf) for leaf in call.call_spec.leaves},
        "call": {"signature": str(call.call_spec.signature), "tree": str(call.tree)},
        "model": model_factors(module),
        "patched": patched_methods(),
    }


def device_of(module: torch.nn.Module) -> torch.device:
    """Return the device of the module's tensors, preferring one other than the CPU."""
    devices = [tensor.device for tensor in (*module.parameters(), *module.buffers())]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _pass_factor(each: str | GraphPass) -> str | dict[str, str]:
    return each if isinstance(each, str) else {"name": each.name, "uuid": each.uuid()}


def _leaf_factor(leaf: TensorLeaf | ConstantLeaf) -> Any:
    if isinstance(leaf, TensorLeaf):
        return {
            "dtype": str(leaf.dtype).removeprefix("torch."),
            "device": str(leaf.device),
            "shape": list(leaf.shape),
            "strides": None if leaf.strides is None else list(leaf.strides),
        }
    if leaf.value is None or type(leaf.value) in (bool, int, float, str):
        return {"value": leaf.value}
    raise KeyFactorError(
        f"argument {leaf.path} is a {type(leaf.value).__module__}.{type(leaf.value).__qualname__}, of which no key can "
        "be made."
    )
