"""Which ranks reach each other's memory: the NVLink domain, which is not the host.

An NVL72 rack is one domain of 18 hosts; two HGX servers are two domains; a host without NVLink
fabric is its own. Each rank says what its driver told it, and `domains` groups the ranks.

What makes two GPUs one domain is the pair of cluster and clique, in a fabric that is complete: a
clique's number alone is not enough, as unrelated racks number theirs alike. What the driver does
not tell is whether IMEX lets two hosts import each other's memory: only an import proves that.
"""

import os
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from pathlib import Path

import pynvml

from workbench.errors import InputError

OVERRIDES = ("auto", "host", "job")
"""How ranks are grouped: by what the driver says, each host on its own, or all ranks together."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
COMPLETED, SUCCESS = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, pynvml.NVML_SUCCESS


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """What one rank found. `cluster` is the fabric's UUID in hex, "" where the driver has none;
    `state` and `status` are NVML's numbers; `gpu` is the GPU's UUID, `mig` whether it is sliced."""

    host: str
    boot_id: str
    gpu: str = ""
    mig: bool = False
    cluster: str = ""
    clique: int = 0
    state: int = 0
    status: int = 0

    @property
    def machine(self) -> tuple[str, str]:
        """The host; names alone are given twice where machines are made from one image."""
        return self.host, self.boot_id

    @property
    def joined(self) -> bool:
        """Whether the GPU has joined a fabric. An H100 without one says that it is complete too,
        but of a cluster that is zero."""
        named = self.cluster.strip("0") != ""
        return named and self.state == COMPLETED and self.status == SUCCESS and not self.mig


def this_host() -> Fabric:
    """The host alone, as for ranks without a GPU."""
    try:
        boot_id = BOOT_ID.read_text().strip()
    except OSError:
        boot_id = ""
    return Fabric(host=os.uname().nodename, boot_id=boot_id)


def read_fabric(index: int, uuid: str = "") -> Fabric:
    """What the driver says of a GPU: the one of that UUID, else number `index` of the driver's own
    count, which CUDA_VISIBLE_DEVICES does not change. Only the host where it says nothing."""
    here = this_host()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return here
    try:
        return _of(_handle(index, uuid), here)
    except pynvml.NVMLError:
        return here
    finally:
        pynvml.nvmlShutdown()


def domains(fabrics: Sequence[Fabric], override: str = "auto") -> list[int]:
    """The number of each rank's domain, counted from 0 in the order of ranks.

    GPUs that have joined one fabric are a domain, across hosts; else those of a host are one. So is
    a host of which only some GPUs have joined, as its ranks could not all meet those of others. A
    slice of a GPU (MIG) has no peers. Raises InputError for an unknown `override`.
    """
    if override not in OVERRIDES:
        raise InputError(f"domain={override!r} must be one of {', '.join(OVERRIDES)}")
    if override == "job":
        return [0] * len(fabrics)
    split = {f.machine for f in fabrics if not f.joined}
    keys: list[tuple[object, ...]] = []
    for rank, f in enumerate(fabrics):
        if override == "auto" and f.mig:
            keys.append(("rank", rank))
        elif override == "host" or f.machine in split:
            keys.append(("host", *f.machine))
        else:
            keys.append(("fabric", f.cluster, f.clique))
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def _handle(index: int, uuid: str) -> object:
    if uuid:
        named = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return pynvml.nvmlDeviceGetHandleByUUID(named.encode())
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def _of(handle: object, here: Fabric) -> Fabric:
    try:
        mig = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:  # a GPU that cannot be sliced
        mig = False
    uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
    found = Fabric(host=here.host, boot_id=here.boot_id, gpu=uuid, mig=mig)
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    try:
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
    except pynvml.NVMLError:  # no fabric, or a driver that does not know of any
        return found
    return Fabric(
        host=here.host,
        boot_id=here.boot_id,
        gpu=uuid,
        mig=mig,
        cluster=bytes(info.clusterUuid).hex(),
        clique=int(info.cliqueId),
        state=int(info.state),
        status=int(info.status),
    )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
