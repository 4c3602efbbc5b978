"""Compiles a Triton kernel for a GPU that need not be there: what its interpreter takes, its compiler may not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.gpus import H200

HOPPER = GPUTarget("cuda", 90, 32)

_POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def compile_for_gpu(kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """The kernel's PTX. `arguments` by parameter: tensors, of which only the dtype counts, numbers, constants, None.
    Raises what Triton's compiler raises, and AssertionError for a kernel that no program has the memory for."""
    signature, constants, attributes = {}, {}, {}
    assert list(arguments) == kernel.arg_names
    for index, (parameter, value) in enumerate(zip(kernel.params, arguments.values(), strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[index,] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            attributes[index,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:  # as Triton tells them apart
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=HOPPER, options=dict(options))
    assert compiled.metadata.shared <= H200.shared_bytes
    ptx: str = compiled.asm["ptx"]
    return ptx
