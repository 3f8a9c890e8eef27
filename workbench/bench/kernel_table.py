"""Every Triton kernel at the study's shapes, as compiled for each target, without a GPU.

A row is what the compiler made of one launch, what the launch must move and compute, and the time
that this takes at the device's peaks: a floor, not a measurement.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from workbench.errors import InputError
from workbench.hardware import Hardware, load_hardware
from workbench.kernels import catalogue  # noqa: F401 (registers the ops)
from workbench.kernels.aot import TARGETS, compile_launch
from workbench.kernels.device import INTERPRET, Launch
from workbench.kernels.ops import Cost, Example, Sizes, examples
from workbench.moe.config import PIPELINES, MoEConfig
from workbench.moe.context import BACKWARD, FORWARD, dry_run

DEVICE = {"sm_90a": "H200", "sm_100a": "B200", "sm_103a": "GB300"}
"""Target -> the device whose peaks a floor is computed with."""
LAUNCH_US = 2.0
"""A kernel whose floor is below this many microseconds is bound by its launch."""
NOT_RUN = "not run on a GPU"


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One launch on one target. `pipelines`: those of our layer that launch the op. `main`: it does
    the op's work, whose FLOP and bytes stand here; else these are 0. Bytes are of HBM; per tile, of
    the operands that a tile is made from.
    """

    op: str
    pipelines: str
    kernel: str
    target: str
    device: str
    main: bool
    instruction: str
    tma: str
    warp_specialised: bool
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_columns: int
    stages: int
    warps: int
    resident: int
    programs: int
    waits: bool
    flop_per_tile: int
    bytes_per_tile: int
    tiles: int
    gflop: float
    hbm_mb: float
    link_mb: float
    bound_by: str
    predicted_us: float
    origin: str
    run: str


def kernel_rows(
    sizes: Sizes | None = None,
    targets: Sequence[str] = tuple(TARGETS),
    ops: Sequence[str] | None = None,
    ptx: Path | None = None,
) -> Iterator[KernelRow]:
    """Compiles and yields row by row. With `ptx`, writes each kernel's PTX into that folder.

    A process that interprets kernels cannot compile them: there, another one does. Raises
    InputError for an unknown target or op.
    """
    sizes = sizes or Sizes()
    if ptx is not None:
        ptx.mkdir(parents=True, exist_ok=True)
    for target in targets:
        if target not in TARGETS:
            raise InputError(f"target={target} must be one of {', '.join(TARGETS)}")
        known = {example.label: example for example in examples(sizes)}
        for op in ops or known:
            if op not in known:
                raise InputError(f"op={op} must be one of {', '.join(known)}")
        if INTERPRET.value:
            yield from _elsewhere(sizes, target, ops, ptx)
            continue
        for op in ops or known:
            launches = known[op].launches(TARGETS[target])
            main = known[op].op.main % len(launches)
            for i, launch in enumerate(launches):
                facts, code = compile_launch(launch, target)
                if ptx is not None:
                    name = f"{op.replace(', ', '-').replace(' ', '-')}.{i}.{facts.kernel}"
                    (ptx / f"{name}.{target}.ptx").write_text(code)
                does = _cost(known[op]) if i == main else Cost(hbm_bytes=0)
                tiles = known[op].op.tiles(sizes, launch) if i == main else 1
                bound, seconds = _floor(does, load_hardware(DEVICE[target]))
                flop, tile_bytes = _tile(sizes, does.hbm_bytes // tiles, launch)
                yield KernelRow(
                    op=op,
                    pipelines=", ".join(_launching()[known[op].op.name]),
                    kernel=facts.kernel,
                    target=target,
                    device=DEVICE[target],
                    main=i == main,
                    instruction=", ".join(facts.instructions) or "none",
                    tma="loads" if facts.tma_loads else "no",
                    warp_specialised=facts.specialised,
                    registers=facts.registers,
                    spill_bytes=facts.spill_bytes,
                    shared_bytes=facts.shared_bytes,
                    tensor_columns=facts.tensor_columns,
                    stages=facts.stages,
                    warps=facts.warps,
                    resident=facts.resident,
                    programs=launch.grid,
                    waits=any("acquire" in access for access in facts.ordered),
                    flop_per_tile=flop,
                    bytes_per_tile=tile_bytes,
                    tiles=tiles,
                    gflop=does.flop / 1e9,
                    hbm_mb=does.hbm_bytes / 1e6,
                    link_mb=does.link_bytes / 1e6,
                    bound_by=bound,
                    predicted_us=seconds * 1e6,
                    origin="predicted",
                    run=NOT_RUN,
                )


@lru_cache(maxsize=1)
def _launching() -> Mapping[str, Sequence[str]]:
    """The pipelines that launch each op, by its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for pipeline in PIPELINES:
        config = MoEConfig(T=2, D=16, F=16, E=2, K=1, ep=2, pipeline=pipeline)
        launches = [launch for kind in (FORWARD, BACKWARD) for launch in dry_run(config, kind)]
        for op in dict.fromkeys(op for _, op, _ in launches):
            found[op].append(pipeline)
    return found


def _elsewhere(
    sizes: Sizes, target: str, ops: Sequence[str] | None, ptx: Path | None
) -> Iterator[KernelRow]:
    """The rows of a target from a process that compiles."""
    command = [
        sys.executable,
        "-m",
        "workbench.cli",
        "kernels",
        "--all",
        "--json",
        "--target",
        target,
    ]
    for name in ("T", "D", "F", "E", "K", "ep"):
        command += [f"--{name}", str(getattr(sizes, name))]
    for op in ops or ():
        command += ["--op", op]
    if ptx is not None:
        command += ["--ptx", str(ptx)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    for line in done.stdout.splitlines():
        yield KernelRow(**json.loads(line))


def _cost(example: Example) -> Cost:
    """What an op must do; of the bytes moved between ranks only those to and from others."""
    cost, ranks = example.cost, example.sizes.ep
    return replace(cost, link_bytes=cost.link_bytes * (ranks - 1) // ranks)


def _floor(does: Cost, hardware: Hardware) -> tuple[str, float]:
    """What bounds the work at the device's peaks, and the seconds that takes, a launch at least."""
    times = {
        "matrix units": does.flop / (hardware.peak_tflops("bf16") * 1e12),
        "HBM": does.hbm_bytes / (hardware.hbm_tb_s * 1e12),
        "link": does.link_bytes / (hardware.scale_up_gb_s * 1e9),
    }
    bound = max(times, key=lambda name: times[name])
    if times[bound] * 1e6 < LAUNCH_US:
        return "launch", LAUNCH_US / 1e6
    return bound, times[bound]


def _tile(sizes: Sizes, hbm_bytes: int, launch: Launch) -> tuple[int, int]:
    """FLOP of one tile, and the bytes of its operands and result (from cache or HBM)."""
    args, c = launch.integers, launch.constants
    item = sizes.dtype.itemsize
    if "BM" not in c:
        return 0, hbm_bytes
    inner = args["K"] if "K" in args else sizes.R // sizes.e
    return 2 * c["BM"] * c["BN"] * inner, item * ((c["BM"] + c["BN"]) * inner + c["BM"] * c["BN"])
