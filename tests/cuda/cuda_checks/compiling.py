"""Compiles recorded kernel launches for a GPU that is not there, and reads what came out."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from deepinfer_backends.cuda_sm100.launch import Launch, plain_function

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
}
_DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Compiled:
    """What one launch compiles to."""

    kernel: str
    ptx: str
    registers: int
    stack: int  # bytes of local memory a thread uses: spills
    shared: int  # bytes of shared memory a program uses
    tensor_memory: int  # columns of tensor memory a program uses (SM100)

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.ptx))


def signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """(types, constants, attributes) of a launch, specialised as Triton's launcher does (so that its cache
    then holds the kernel): ones and Nones are constants, multiples of 16 are marked."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes: dict[tuple[int], Any] = {}
    for index, parameter in enumerate(plain_function(launch.kernel).params):
        name = parameter.name
        if name in launch.constants:
            types[name] = "constexpr"
            continue
        value = launch.args[index]
        if isinstance(value, torch.Tensor):
            types[name] = _TYPES[value.dtype]
            attributes[(index,)] = _DIVISIBLE
        elif value is None or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            types[name] = "constexpr"
            constants[name] = value
        elif isinstance(value, int):
            types[name] = "i32" if abs(value) < 2**31 else "i64"
            if not parameter.do_not_specialize:
                attributes[(index,)] = _DIVISIBLE if value % 16 == 0 else []
        else:
            types[name] = "fp32"
    return types, constants, attributes


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compiles one launch for `arch` (90 or 100), without a GPU."""
    types, constants, attributes = signature(launch)
    kernel = plain_function(launch.kernel)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, types, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": False}
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        usage = subprocess.run([tools / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match, usage
    return Compiled(
        source.name, result.asm["ptx"], int(match[1]), int(match[2]), result.metadata.shared, getattr(result.metadata, "tmem_size", 0)
    )
