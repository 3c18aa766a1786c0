"""Compiles the Triton kernels for a GPU on a machine without a GPU.

Triton's interpreter accepts code that the compiler rejects. Here the wrappers run on CPU tensors, and each launch
compiles the kernel for the given architecture instead of running it, with Triton's passes and NVIDIA's assembler, which
is part of Triton. The registers and memory that the assembler reports are recorded.

    TRITON_INTERPRET=0 python -m harness.kernels.gpu_compiler [sm90]
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from harness.kernels import gpu_launches
from kvferry.kernels.gpu import check, device, launch

ARCHITECTURES = {"sm80": 80, "sm90": 90, "sm100": 100}
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Resource usage of a kernel compiled for specific types and constants."""

    kernel: str
    case: str
    registers: int
    stack_bytes: int
    """Stack bytes per thread, mostly spilled registers; should be 0."""
    shared_bytes: int
    """Shared memory per thread block in bytes, as requested at launch."""


def compile_all(architecture: str, only: str = "") -> list[Compiled]:
    """Compile every kernel launch of `gpu_launches.CASES` once.

    Args:
        architecture: a name in `ARCHITECTURES`.
        only: substring of the names of the cases to compile; empty selects all.
    """
    if device.INTERPRETED:
        raise RuntimeError("Triton runs in interpreter mode; start this process with TRITON_INTERPRET=0")
    found: dict[tuple[object, ...], Compiled] = {}
    target = GPUTarget("cuda", ARCHITECTURES[architecture], 32)
    for name, case in gpu_launches.CASES.items():
        if only in name:
            with (
                _compiling(name, target, found),
                mock.patch.object(launch, "device_class", return_value=architecture),
                mock.patch.object(check, "why_not", return_value=None),
            ):
                case()
    return list(found.values())


def _compiling(case: str, target: GPUTarget, found: dict[tuple[object, ...], Compiled]) -> Any:
    """Return a context manager in which kernel launches only compile."""

    def run(self: JITFunction[Callable[..., object]], *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
        options = {key: more.pop(key) for key in list(more) if key not in self.arg_names}
        values = dict(zip(self.arg_names, args, strict=False)) | more
        signature, constants, attributes = _specialized(self, values)
        key = (self.__name__, *signature.items(), *sorted(constants.items()), *attributes, *options.items())
        if key not in found:
            source = ASTSource(self, signature, constants, attributes)
            kernel = triton.compile(source, target=target, options=options)
            registers, stack = _usage(kernel.asm["cubin"])
            found[key] = Compiled(self.__name__, case, registers, stack, kernel.metadata.shared)

    return mock.patch.object(JITFunction, "run", run)


def _specialized(
    kernel: JITFunction[Callable[..., object]], values: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[object]]]]:
    """Return the types, constants and alignments of a launch's arguments."""
    signature, constants, attributes = {}, {}, {}
    for index, param in enumerate(kernel.params):
        value = values[param.name]
        if param.is_constexpr:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = f"*{_TYPES[value.dtype]}"
            if value.data_ptr() % 16 == 0:
                attributes[index,] = _ALIGNED
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        elif value == 1 and not param.do_not_specialize:
            signature[param.name], constants[param.name] = "constexpr", 1
        else:
            signature[param.name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[index,] = _ALIGNED
    return signature, constants, attributes


_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return (registers per thread, stack bytes per thread) of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", output)
    assert numbers, output
    return int(numbers[1]), int(numbers[2])


def main() -> None:
    """Print one JSON object per kernel."""
    architecture, only = [*sys.argv[1:], *("sm90", "")[len(sys.argv) - 1 :]]
    for row in compile_all(architecture, only):
        sys.stdout.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
