"""A driver's answers as tests give them: `install` puts them in place of NVML's.

They are made from the documented structures, so that what reads the structures is tested too.
"""

from typing import Any

import pynvml
import pytest

RACK, OTHER_RACK = "b1" * 16, "c2" * 16
ZERO = "00" * 16


def gpu(
    uuid: str = "GPU-0", cluster: str = ZERO, clique: int = 0, state: int = 3, **more: Any
) -> dict[str, Any]:
    """One GPU's answers. `fabric=False`: the driver knows of no fabric."""
    return {
        "uuid": uuid,
        "cluster": cluster,
        "clique": clique,
        "state": state,
        "status": 0,
        "mig": 0,
        "fabric": True,
    } | more


def install(monkeypatch: pytest.MonkeyPatch, gpus: list[dict[str, Any]]) -> None:
    """NVML with these GPUs; without any, the library is not there."""

    def init() -> None:
        if not gpus:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def by_index(index: int) -> dict[str, Any]:
        if index >= len(gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return gpus[index]

    def by_uuid(uuid: bytes) -> dict[str, Any]:
        for one in gpus:
            if one["uuid"] == uuid.decode():
                return one
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def mig(one: dict[str, Any]) -> list[int]:
        if one["mig"] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [one["mig"], one["mig"]]

    def fabric(one: dict[str, Any], reference: Any) -> int:
        info = reference._obj
        assert info.version == 0x02000024  # of the structure that is asked for, 36 bytes
        if not one["fabric"]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        info.clusterUuid[:] = bytes.fromhex(one["cluster"])
        info.cliqueId, info.state, info.status = one["clique"], one["state"], one["status"]
        return 0

    def unsupported(one: dict[str, Any]) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name, answer in {
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUUID": lambda one: one["uuid"],
        "nvmlDeviceGetMigMode": mig,
        "nvmlDeviceGetGpuFabricInfoV": fabric,
        "nvmlDeviceGetClockInfo": lambda one, kind: {1: 1755, 2: 3201}[kind],
        "nvmlDeviceGetTemperature": lambda one, sensor: 54,
        "nvmlDeviceGetPowerUsage": unsupported,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda one: 0x4 | 0x1,
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
