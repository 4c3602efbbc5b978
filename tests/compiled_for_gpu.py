"""Compiles a Triton kernel for a GPU that need not be there: what its interpreter takes, its compiler may not."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.gpus import SHARED_BYTES

_POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.int8: "*i8", torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


def compile_for_gpu(kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """The kernel's PTX, of `compiled_for_gpu`."""
    ptx: str = compiled_for_gpu(kernel, arguments, options).asm["ptx"]
    return ptx


def asked_before_the_wait(compiled: Any) -> tuple[int, int]:
    """Of a kernel that waits for the one ahead in the first turn of its loop: copies to shared memory before the loop,
    and loads of floats before the wait, by Triton's own form of the kernel."""
    lines = compiled.asm["ttgir"].splitlines()
    loops = [at for at, line in enumerate(lines) if "scf.for" in line]
    waits = [at for at, line in enumerate(lines) if "griddepcontrol.wait" in line]
    loop = max(at for at in loops if at < max(waits))
    wait = min(at for at in waits if at > loop)
    copies = sum("async_copy_global_to_local" in line for line in lines[:loop])
    floats = sum("tt.load" in line and re.search(r"ptr<(bf16|f16|f32)", line) is not None for line in lines[:wait])
    return copies, floats


def stack_bytes(compiled: Any, folder: Path) -> int:
    """Of a thread's registers that did not fit, by the binary's own account."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__path__[0], "backends", "nvidia", "bin", "cuobjdump")
    told = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", told)[-1])


def compiled_for_gpu(
    kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, Any], *, capability: int = 90
) -> Any:
    """Return what Triton makes of a kernel for a GPU of `capability`, by default Hopper's. `arguments` has for each
    parameter a tensor, of which only the dtype counts, a number, a constant or None. Raises what Triton's compiler and
    ptxas raise, and AssertionError for a kernel that no program has the memory for."""
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
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    assert compiled.metadata.shared <= SHARED_BYTES[capability]
    return compiled
