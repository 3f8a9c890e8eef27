"""Ahead-of-time compilation of launches for a GPU that is not there, and facts of the result.

Facts are read from the PTX (matrix instructions, descriptors, waits and signals, fences) and from
the cubin (registers, stack, shared memory) with the cuobjdump that comes with Triton.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from .device import Launch, Target, absent_device

TARGETS = {
    "sm_90a": Target(arch=90, sms=132),
    "sm_100a": Target(arch=100, sms=148),
    "sm_103a": Target(arch=103, sms=148),
}
"""SMs of H100 and H200, B200, B300 and GB300 (152 have been reported for B300 too)."""
SHARED_PER_SM = 227 * 1024
"""Bytes of shared memory that programs of one SM can have together; all three targets. Each takes
1 KiB more than it asks for. Source: CUDA programming guide, compute capabilities 9.0 and 10.x."""
REGISTERS_PER_SM, WARPS_PER_SM, TENSOR_COLUMNS_PER_SM = 65536, 64, 512
"""Same source. Tensor memory is there on 10.x only, 512 columns of 128 lanes of 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the compiler made of a launch.

    `instructions` are the distinct matrix instructions. `tma_loads`, `tma_stores` count bulk
    tensor copies in the code. Bytes: `spill_bytes` per thread (stack and local memory),
    `shared_bytes` per program. `tensor_columns` of tensor memory. `resident` programs fit an SM.
    `ordered`: the accesses to global memory that order others, as written in the PTX.
    `async_fences`: orderings of ordinary accesses before descriptor reads. `specialised`: loads
    and products run on warps of their own.
    """

    kernel: str
    target: str
    instructions: tuple[str, ...]
    tma_loads: int
    tma_stores: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_columns: int
    warps: int
    stages: int
    resident: int
    ordered: tuple[str, ...]
    async_fences: int
    specialised: bool
    vector_accesses: int
    scalar_accesses: int


def compile_launch(launch: Launch, target: str) -> tuple[Facts, str]:
    """Facts and PTX of a launch compiled for one of TARGETS, as Triton would do to run it there.

    The process must not be in interpreter mode. Results are cached on disk by Triton.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 must not be set where kernels are compiled")
    with absent_device(TARGETS[target].arch):
        compiled = launch.compile()
    ptx = str(compiled.asm["ptx"])
    usage = _usage(compiled.asm["cubin"])
    data: Any = compiled.metadata
    warps = int(data.num_warps)
    shared, columns = int(data.shared), int(data.tmem_size or 0)
    return Facts(
        kernel=launch.name,
        target=target,
        instructions=tuple(sorted(set(_MATRIX.findall(ptx)))),
        tma_loads=len(re.findall(r"cp\.async\.bulk\.tensor\S*\.shared\S*\.global", ptx)),
        tma_stores=len(re.findall(r"cp\.async\.bulk\.tensor\S*\.global\.shared", ptx)),
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=shared,
        tensor_columns=columns,
        warps=warps,
        stages=launch.num_stages if "STAGES" in launch.constants else 1,
        resident=resident(registers=usage["REG"], warps=warps, shared=shared, columns=columns),
        ordered=tuple(_ORDERED.findall(ptx)),
        async_fences=len(re.findall(r"fence\.proxy\.async;", ptx)),
        specialised=warps > launch.num_warps,
        vector_accesses=len(re.findall(r"(?:ld|st)\.global\S*\.v[248]\.", ptx)),
        scalar_accesses=len(re.findall(r"(?:ld|st)\.global\S*\.b(?:8|16)\b", ptx)),
    ), ptx


def resident(*, registers: int, warps: int, shared: int, columns: int) -> int:
    """Programs that one SM holds at a time; registers are handed out 256 per warp at a time."""
    per_warp = -(-registers * 32 // 256) * 256
    limits = [
        WARPS_PER_SM // warps,
        REGISTERS_PER_SM // (per_warp * warps),
        (SHARED_PER_SM + 1024) // (shared + 1024),
    ]
    if columns:
        limits.append(TENSOR_COLUMNS_PER_SM // columns)
    return min(limits)


_MATRIX = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*")
# An atomic that adds nothing and is waited for comes out as a load with the same ordering.
_ORDERED = re.compile(
    r"\b(?:(?:ld|st)\.global\.(?:gpu|sys|cta|cluster)|atom\.global|red\.global)"
    r"\.[\w.]+"
)


def _usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED and LOCAL of the one kernel in a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = {name: int(value) for name, value in _FIELD.findall(done.stdout)}
    missing = {"REG", "STACK", "LOCAL"} - set(found)
    if missing:
        raise RuntimeError(f"cuobjdump says nothing of {sorted(missing)}: {done.stdout}")
    return found


_FIELD = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
