"""What a host's driver, torch and Triton say of its GPUs, as facts that checks can look at.

`look` asks in this process. `look_apart` asks in another, so that a driver that hangs or crashes
takes nothing with it, and no memory of a GPU is held: what starts ranks uses that one. As a module
it prints the facts as JSON, or tries symmetric memory: `probe.py [symmetric BYTES]`.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import metadata

import pynvml
from pydantic import TypeAdapter, ValidationError

from workbench.cuda import slowed
from workbench.domain import Fabric, read_fabric, this_host
from workbench.errors import one_line

LOOK_S, SYMMETRIC_S = 60.0, 60.0
LAUNCHER = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU by the driver. `capability` as in 9.0; `slowed`: why its clock is held down now."""

    index: int
    name: str
    uuid: str
    capability: str = ""
    memory_bytes: int = 0
    free_bytes: int = 0
    sm_mhz: int = 0
    max_mhz: int = 0
    slowed: tuple[str, ...] = ()
    fabric: Fabric

    @property
    def arch(self) -> int:
        """90 as in sm_90."""
        return int(self.capability.replace(".", "") or 0)


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """All that a host says. Texts that state a problem are "" where there is none.

    gpus                 every GPU of the host, whatever CUDA_VISIBLE_DEVICES says
    visible              UUIDs of those that torch sees, in its order
    driver_cuda          the newest CUDA that the driver runs
    torch_cuda           the CUDA that torch is built for, "" for a CPU build
    triton_wanted        the version that torch pins, "" where it pins none
    without_access       pairs of `visible` that cannot reach each other's memory
    symmetric            why symmetric memory cannot be had; None where it was not tried
    """

    here: Fabric
    nvml_problem: str = ""
    driver: str = ""
    driver_cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    torch: str = ""
    torch_cuda: str = ""
    torch_problem: str = ""
    visible: tuple[str, ...] = ()
    triton: str = ""
    triton_wanted: str = ""
    nccl: str = ""
    without_access: tuple[tuple[int, int], ...] = ()
    symmetric: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def seen(self) -> list[Gpu]:
        """The GPUs that torch sees; where it says nothing, all of the host."""
        known = {gpu.uuid: gpu for gpu in self.gpus}
        return [known[u] for u in self.visible if u in known] or list(self.gpus)


Probe = Callable[[], HostFacts]
_FACTS = TypeAdapter(HostFacts)


def look() -> HostFacts:
    """The facts, asked in this process; symmetric memory is not tried."""
    found = _by_torch(_by_driver(HostFacts(here=this_host())))
    return replace(found, environment={n: os.environ[n] for n in LAUNCHER if n in os.environ})


def look_apart() -> HostFacts:
    """The facts, asked in a process of its own, which is given LOOK_S."""
    said, problem = _child([], LOOK_S)
    try:
        return _FACTS.validate_json(said.splitlines()[-1] if said else "")
    except ValidationError:
        problem = problem or "what asks it said nothing that can be read"
        return HostFacts(here=this_host(), nvml_problem=problem)


def look_deeply(nbytes: int = 1 << 20) -> HostFacts:
    """The same, and whether a rank alone can have symmetric memory."""
    facts = look_apart()
    if not facts.visible:
        return facts
    _, problem = _child(["symmetric", str(nbytes)], SYMMETRIC_S)
    return replace(facts, symmetric=problem)


def _child(arguments: list[str], limit_s: float) -> tuple[str, str]:
    """What a probe prints, and why it failed; "" where it did not."""
    command = [sys.executable, "-m", "workbench.bench.probe", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return "", f"it did not answer within {limit_s:g} s"
    if done.returncode == 0:
        return done.stdout.strip(), ""
    last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
    return done.stdout.strip(), one_line(f"exit code {done.returncode}: {last}", 200)


def _by_driver(facts: HostFacts) -> HostFacts:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return replace(facts, nvml_problem=f"NVML: {error}")
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        return replace(
            facts,
            driver=_text(pynvml.nvmlSystemGetDriverVersion()),
            driver_cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
            gpus=tuple(map(_gpu, range(pynvml.nvmlDeviceGetCount()))),
        )
    except pynvml.NVMLError as error:
        return replace(facts, nvml_problem=f"NVML: {error}")
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        capability=f"{major}.{minor}",
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        sm_mhz=_or_0(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        max_mhz=_or_0(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        slowed=slowed(_or_0(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)),
        fabric=read_fabric(index),
    )


def _or_0(ask: Callable[..., int], *arguments: object) -> int:
    try:
        return int(ask(*arguments))
    except pynvml.NVMLError:  # not said of this GPU, or not to this user
        return 0


def _by_torch(facts: HostFacts) -> HostFacts:
    import torch

    pins = [re.match(r"triton\s*==\s*([\d.]+)", line) for line in metadata.requires("torch") or ()]
    facts = replace(
        facts,
        torch=torch.__version__,
        torch_cuda=torch.version.cuda or "",
        triton=metadata.version("triton"),
        triton_wanted=next((found[1] for found in pins if found), ""),
    )
    if torch.version.cuda is None:
        return facts
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
        return replace(
            facts,
            visible=tuple(gpu_uuid(index) for index in range(count)),
            nccl=".".join(map(str, torch.cuda.nccl.version())),
            without_access=tuple(_without_access(count)),
        )
    except (RuntimeError, AssertionError) as error:  # torch raises either, by its build
        return replace(facts, torch_problem=one_line(str(error).partition("\n")[0], 200))


def gpu_uuid(index: int) -> str:
    """The UUID of a GPU by torch's number, as the driver writes it."""
    import torch

    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _without_access(count: int) -> Iterator[tuple[int, int]]:
    import torch

    for a in range(count):
        for b in range(count):
            if a != b and not torch.cuda.can_device_access_peer(a, b):
                yield a, b


def try_symmetric(nbytes: int) -> None:
    """Allocates symmetric memory and meets in it, in a world of this process. Raises what torch
    raises."""
    import torch
    import torch.distributed as dist
    from torch.distributed import _symmetric_memory as symmetric

    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    memory = symmetric.empty([nbytes], dtype=torch.uint8, device=torch.device("cuda", 0)).zero_()
    world = dist.group.WORLD
    assert world is not None
    handle = symmetric.rendezvous(memory, world)
    handle.barrier(channel=0, timeout_ms=10_000)
    torch.cuda.synchronize()


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    if sys.argv[1:2] == ["symmetric"]:
        try_symmetric(int(sys.argv[2]))
        sys.stdout.flush()
        os._exit(0)  # torch's own end may abort once memory was shared
    print(_FACTS.dump_json(look()).decode())
