"""Compiles kernels for GPUs that need not be present and reads what they use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark_kernels.testing.chips import Chip
    from dspark_kernels.tiles import Build

BLACKWELL = 100
"""From this architecture on, Triton has an assembler of its own."""


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses.

    Attributes:
        shared_bytes: Shared memory per program, dynamic and static.
        registers: Registers per thread.
        spilled: Bytes (NVIDIA) or registers (AMD) written to memory for want of registers.
        stack_bytes: Local memory per thread.
        products: Matrix instructions in the code: 0 in a kernel with a dot is a lost tensor core.
    """

    shared_bytes: int
    registers: int
    spilled: int
    stack_bytes: int
    products: int

    def problems(self, chip: Chip) -> list[str]:
        """Say what exceeds a chip's limits; an empty list means it fits."""
        found = []
        if self.shared_bytes > chip.shared_bytes:
            found.append(f"shared memory {self.shared_bytes} B over {chip.shared_bytes} B")
        if self.registers > chip.registers:
            found.append(f"{self.registers} registers over {chip.registers}")
        if self.spilled:
            found.append(f"{self.spilled} spilled")
        if self.stack_bytes:
            found.append(f"{self.stack_bytes} B of stack")
        return found


def with_ones(build: Build) -> Build:
    """Return the variant the launcher compiles when every count it specialises on is 1.

    Such arguments become compile-time constants, which have fewer methods than values.
    """
    ones = {
        name: 1
        for name in build.kernel.arg_names
        if _type_of(name, build) == "i32" and name not in build.kernel.do_not_specialize
    }
    return replace(build, name=f"{build.name}, ones", constants={**build.constants, **ones})


def compile_build(build: Build, chip: Chip) -> Resources:
    """Compile one variant for one chip.

    Args:
        build: Kernel, types and constants, as its launcher would choose them.
        chip: Target; it need not be present.

    Returns:
        Resources: What the machine code uses.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = build.kernel.arg_names
    signature = {name: _type_of(name, build) for name in names}
    # As the launcher's specialisation of aligned pointers and strides: without it loads are narrow.
    aligned = [n for n in names if n in build.pointers or n.startswith("stride_")]
    source = ASTSource(
        fn=build.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in build.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": build.launch.num_warps, "num_stages": build.launch.num_stages}
    target = GPUTarget(chip.backend, chip.arch, chip.warp_size)
    compiled = triton.compile(source, target=target, options=options)
    return _read_hip(compiled) if chip.backend == "hip" else _read_cuda(compiled, chip)


def _type_of(name: str, build: Build) -> str:
    if name in build.constants:
        return "constexpr"
    if name in build.pointers:
        return f"*{build.pointers[name]}"
    if name in build.floats:
        return "fp32"
    return "i64" if name.startswith("stride_") else "i32"


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _read_cuda(compiled: Any, chip: Chip) -> Resources:
    ptx = compiled.asm["ptx"]
    arch = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    if arch is None:
        raise RuntimeError("the compiler's PTX must name its target; got none. Check Triton.")
    with tempfile.TemporaryDirectory() as folder:
        code, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        code.write_text(ptx)
        cubin.write_bytes(compiled.asm["cubin"])
        assembler = _tool("ptxas-blackwell" if int(chip.arch) >= BLACKWELL else "ptxas")
        report = _run(assembler, "-v", f"--gpu-name={arch[1]}", str(code), "-o", "/dev/null")
        usage = _run(_tool("cuobjdump"), "-res-usage", str(cubin))
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)]
    products = len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx))
    return Resources(
        shared_bytes=compiled.metadata.shared,
        registers=_number(r"REG:(\d+)", usage),
        spilled=sum(spills),
        stack_bytes=_number(r"STACK:(\d+)", usage),
        products=products,
    )


def _read_hip(compiled: Any) -> Resources:
    text = compiled.asm["amdgcn"]
    return Resources(
        shared_bytes=compiled.metadata.shared,
        registers=_number(r"\.vgpr_count:\s+(\d+)", text),
        # Scalar registers spill to lanes of vector registers, not to memory: not counted.
        spilled=_number(r"\.vgpr_spill_count:\s+(\d+)", text),
        stack_bytes=_number(r"\.private_segment_fixed_size:\s+(\d+)", text),
        products=len(re.findall(r"\bv_mfma_", text)),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler's report must match {pattern!r}; got none. Check Triton.")
    return int(found[1])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise RuntimeError(f"{command[0]} must succeed; it said: {done.stderr.strip()[:500]}")
    return done.stdout + done.stderr
