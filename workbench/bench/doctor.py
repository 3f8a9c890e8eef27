"""Whether this host's GPUs can run the layer: one line for each thing that must be right.

Every check is a function of `HostFacts`, so a fault can be shown without the machine that has it.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.bench.probe import Gpu, HostFacts, Probe, gpu_uuid, look_apart
from workbench.domain import domains, this_host

State = Literal["ok", "warning", "failed", "not applicable"]
ARCHS = (90, 100, 103)
"""What the kernels are made for: H200, B200, GB300."""
LEAST_TRITON = "3.8"
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was found, and what to do about it. `blocks`: no GPU can be used as it is."""

    name: str
    state: State
    found: str
    advice: str = ""
    blocks: bool = False

    def line(self) -> str:
        """The check as a line for people."""
        told = f"{self.found}; {self.advice}" if self.advice else self.found
        return f"{self.state:14} {self.name}: {told}"


@dataclass(frozen=True, kw_only=True)
class Need:
    """What is to be run: ranks on this host, and the bytes of each one's arena. Without `peers`
    the ranks send rows by collectives alone, as `alltoall` does."""

    ranks: int = 1
    arena_bytes: int = 0
    peers: bool = True


def checks(facts: HostFacts, need: Need) -> list[Check]:
    """Every check, in the order in which what fails should be mended."""
    found = [_driver(facts)]
    ready = found[0].state == "ok"
    for name, check in CHECKS.items():
        state, told, advice, blocks = check(facts, need) if ready else _no("needs a driver")
        found.append(Check(name=name, state=state, found=told, advice=advice, blocks=blocks))
    return found


def elsewhere(device: str) -> list[Check]:
    """What there is to say where ranks run on another kind of device than a GPU of this host."""
    told = f"device={device} needs none of it"
    return [Check(name=name, state="not applicable", found=told) for name in ("driver", *CHECKS)]


def exit_code(found: Sequence[Check]) -> int:
    """3 where no GPU can be used, 1 where something failed, else 0."""
    if any(check.blocks for check in found):
        return 3
    return int(any(check.state == "failed" for check in found))


def cuda_problem(
    ranks_per_host: int,
    arena_bytes: int = 0,
    peers: bool = True,
    probe: Probe = look_apart,
) -> str | None:
    """Why ranks on GPUs cannot be started on this host, in one line; None if nothing speaks
    against it."""
    need = Need(ranks=ranks_per_host, arena_bytes=arena_bytes, peers=peers)
    for check in checks(probe(), need):
        if check.state == "failed":
            return f"device='cuda': {check.found}; {check.advice}"
    return None


Verdict = tuple[State, str, str, bool]
"""State, what was found, what to do, and whether no GPU can be used."""


def _ok(found: str) -> Verdict:
    return "ok", found, "", False


def _no(found: str) -> Verdict:
    return "not applicable", found, "", False


def _driver(facts: HostFacts) -> Check:
    if facts.nvml_problem:
        return Check(
            name="driver",
            state="failed",
            found=f"driver=none must be loaded: {facts.nvml_problem}",
            advice="install the NVIDIA driver, or start the container with its GPUs",
            blocks=True,
        )
    return Check(name="driver", state="ok", found=facts.driver)


def _torch(facts: HostFacts, _: Need) -> Verdict:
    if not facts.torch_cuda:
        found = f"torch={facts.torch} must be a CUDA build"
        return "failed", found, "install it with pip's -c constraints-cuda.txt", True
    return _ok(f"{facts.torch} for CUDA {facts.torch_cuda}")


def _cuda(facts: HostFacts, _: Need) -> Verdict:
    if not facts.torch_cuda:
        return _no("torch has no CUDA")
    has, wants = number(facts.driver_cuda), number(facts.torch_cuda)
    told = f"driver={facts.driver} (CUDA {facts.driver_cuda})"
    rule = f"CUDA {facts.torch_cuda}, which torch {facts.torch} is built for"
    if has[:1] < wants[:1]:
        advice = f"install a newer driver, or a torch built for CUDA {facts.driver_cuda}"
        return "failed", f"{told} must run {rule}", advice, True
    if facts.torch_problem:
        found = f"torch sees no GPU: {facts.torch_problem}"
        return "failed", found, "see that nvidia-smi works for this user, here", True
    if has < wants:
        return "warning", f"{told} is older than {rule}", "install a newer driver", False
    return _ok(f"driver runs CUDA {facts.driver_cuda}, torch is built for {facts.torch_cuda}")


def _triton(facts: HostFacts, _: Need) -> Verdict:
    advice = "install both with pip's -c constraints-cuda.txt"
    wanted = facts.triton_wanted
    if wanted and number(facts.triton) != number(wanted):
        found = f"triton={facts.triton} must be {wanted}, which torch {facts.torch} asks for"
        return "failed", found, advice, True
    if number(facts.triton) < number(LEAST_TRITON):
        found = f"triton={facts.triton} must be at least {LEAST_TRITON}, which the kernels need"
        return "failed", found, advice, True
    return _ok(facts.triton)


def _gpus(facts: HostFacts, need: Need) -> Verdict:
    seen = facts.seen()
    if not seen:
        return "failed", "GPUs=0 must be at least 1", "give this host or container a GPU", True
    old = [gpu for gpu in seen if gpu.arch not in ARCHS]
    if old:
        rule = f"must be one of {', '.join(f'sm_{arch}' for arch in ARCHS)}"
        found = f"gpu {old[0].index} ({old[0].name}): arch=sm_{old[0].arch} {rule}"
        advice = "choose others with CUDA_VISIBLE_DEVICES: the kernels are made for these"
        return "failed", found, advice, len(old) == len(seen)
    if len(seen) < need.ranks:
        found = f"ranks_per_host={need.ranks} must be at most {len(seen)}, the GPUs that are seen"
        return "failed", found, "ask for fewer ranks, or for more hosts", False
    names = ", ".join(dict.fromkeys(gpu.name for gpu in seen))
    memory = min(gpu.memory_bytes for gpu in seen) / GIB
    return _ok(f"{len(seen)} x {names}, sm_{seen[0].arch}, {memory:.0f} GiB each")


def _mig(facts: HostFacts, _: Need) -> Verdict:
    sliced = [gpu for gpu in facts.seen() if gpu.fabric.mig]
    if sliced:
        found = f"gpu {sliced[0].index}: mig=on must be off, as a slice has no peers"
        advice = f"nvidia-smi -i {sliced[0].index} -mig 0 turns it off"
        return "failed", found, advice, len(sliced) == len(facts.seen())
    return _ok("off")


def _memory(facts: HostFacts, need: Need) -> Verdict:
    least = min(facts.seen(), key=lambda gpu: gpu.free_bytes, default=None)
    if least is None:
        return _no("no GPU")
    if least.free_bytes < need.arena_bytes:
        rule = f"must be at least {_gib(need.arena_bytes)}, the arena of a rank"
        found = f"gpu {least.index}: free memory={_gib(least.free_bytes)} {rule}"
        return "failed", found, "end what else runs there (nvidia-smi names it)", False
    return _ok(f"{_gib(least.free_bytes)} free on gpu {least.index}, the fullest")


def _visible(facts: HostFacts, need: Need) -> Verdict:
    given = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return _ok("CUDA_VISIBLE_DEVICES is not set, all GPUs are seen")
    ranks = max(need.ranks, int(facts.environment.get("LOCAL_WORLD_SIZE", 1)))
    launched = {"LOCAL_RANK", "SLURM_LOCALID"} & set(facts.environment)
    if len(facts.visible) < 2 and (ranks > 1 or (launched and len(facts.gpus) > 1)):
        found = f"CUDA_VISIBLE_DEVICES={given!r} must be the same on all ranks of a host"
        advice = "let every rank see every GPU: with SLURM --gpus-per-node, no --gpus-per-task"
        return "failed", found, advice, False
    return _ok(f"CUDA_VISIBLE_DEVICES={given} shows {len(facts.visible)} of {len(facts.gpus)}")


def _peers(facts: HostFacts, need: Need) -> Verdict:
    if len(facts.visible) < 2:
        return _no("one GPU has no peers")
    if facts.without_access:
        a, b = facts.without_access[0]
        count = len(facts.visible) * (len(facts.visible) - 1)
        found = f"gpus {a} and {b} must have peer access"
        found += f" ({len(facts.without_access)} of {count} pairs have none)"
        advice = "see nvidia-smi topo -m; pipeline alltoall needs none"
        return ("failed" if need.peers and need.ranks > 1 else "warning"), found, advice, False
    return _ok(f"every pair of {len(facts.visible)} GPUs")


def _fabric(facts: HostFacts, _: Need) -> Verdict:
    fabrics = [gpu.fabric for gpu in facts.seen()]
    joined = [f for f in fabrics if f.joined]
    if not joined:
        return _no("no NVLink fabric beyond the host")
    if len(joined) < len(fabrics):
        out = next(gpu for gpu in facts.seen() if not gpu.fabric.joined)
        found = f"gpu {out.index}: fabric state={out.fabric.state} must be 3 (completed)"
        return "warning", found, "see nvidia-smi -q, Fabric; the host is a domain of its own", False
    count = len(set(domains(fabrics)))
    return _ok(f"cluster {joined[0].cluster}, clique {joined[0].clique}, domains here: {count}")


def _symmetric(facts: HostFacts, _: Need) -> Verdict:
    if facts.symmetric is None:
        return _no("not tried")
    if facts.symmetric:
        found = f"symmetric memory must be had by a rank alone: {facts.symmetric}"
        return "failed", found, "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 helps where it hangs", False
    return _ok("allocated, and met in, by a rank alone")


def _nccl(facts: HostFacts, _: Need) -> Verdict:
    if not facts.nccl:
        return "warning", "torch has no NCCL", "alltoall needs it on GPUs", False
    return _ok(facts.nccl)


def _clocks(facts: HostFacts, _: Need) -> Verdict:
    for gpu in facts.seen():
        if gpu.slowed:
            found = f"gpu {gpu.index}: {_mhz(gpu)}, held down by {', '.join(gpu.slowed)}"
            return "warning", found, "times measured now are not the GPU's best", False
    return _ok(", ".join(dict.fromkeys(_mhz(gpu) for gpu in facts.seen())) or "not said")


CHECKS: dict[str, Callable[[HostFacts, Need], Verdict]] = {
    "torch": _torch,
    "cuda": _cuda,
    "triton": _triton,
    "gpus": _gpus,
    "mig": _mig,
    "visible devices": _visible,
    "memory": _memory,
    "peers": _peers,
    "fabric": _fabric,
    "symmetric memory": _symmetric,
    "nccl": _nccl,
    "clocks": _clocks,
}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank sees: its own GPU and all that torch shows it, by UUID."""

    machine: tuple[str, str]
    name: str
    gpu: str
    visible: tuple[str, ...]
    masked: str = ""


def seen_here(index: int) -> Seen:
    """What this rank sees, whose GPU has number `index`."""
    import torch

    return Seen(
        machine=this_host().machine,
        name=torch.cuda.get_device_name(index),
        gpu=gpu_uuid(index),
        visible=tuple(map(gpu_uuid, range(torch.cuda.device_count()))),
        masked=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    )


def ranks_problem(seen: Sequence[Seen]) -> str | None:
    """Why the ranks cannot form a group, in one line; the same on every rank that asks."""
    for rank, one in enumerate(seen):
        first = next(p for p, other in enumerate(seen) if other.machine == one.machine)
        if one.visible != seen[first].visible:
            rule = f"must show the GPUs that rank {first} sees on the same host"
            return f"rank {rank}: CUDA_VISIBLE_DEVICES={one.masked!r} {rule}"
        twin = next(p for p, other in enumerate(seen) if other.gpu == one.gpu)
        if twin != rank:
            return f"rank {rank}: gpu={one.gpu} must not be that of rank {twin}"
        if one.name != seen[0].name:
            return f"rank {rank}: device={one.name!r} must be {seen[0].name!r} as on rank 0"
    return None


def number(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.14.1+cu130 -> (2, 14, 1)."""
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def _mhz(gpu: Gpu) -> str:
    return f"SM clock {gpu.sm_mhz} of {gpu.max_mhz} MHz"
