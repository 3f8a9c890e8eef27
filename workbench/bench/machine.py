"""What a measurement was made on and with: device, versions, git state, memory, clocks."""

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

import workbench

_PACKAGES = ("torch", "triton", "numpy", "pandas")
CGROUPS = Path("/sys/fs/cgroup")


def device_label(device: str) -> str:
    """The device by the name its driver gives it; a CPU says that it is one, and its cores."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    cores = len(os.sched_getaffinity(0))
    return f"CPU {_cpu_name()}, {cores} core{'s' * (cores != 1)}"


def clock_mhz(device: str) -> float | None:
    """The device's clock as it is now, where it can be read."""
    if device == "cuda":
        import torch

        try:
            return float(torch.cuda.clock_rate())
        except (RuntimeError, ModuleNotFoundError, AttributeError):
            return None
    found = [core.current for core in psutil.cpu_freq(percpu=True)]
    return max(found) if found else None


def available_bytes() -> int:
    """Memory that new processes of this host can have: what is free or can be freed, and no more
    than the control groups (v2) of this one leave."""
    found = [int(psutil.virtual_memory().available)]
    own = re.search(r"^0::/(.*)$", _read("/proc/self/cgroup"), re.MULTILINE)
    group = CGROUPS / (own[1] if own else "")
    for folder in (group, *group.parents):
        limit, used = (_read(folder / f"memory.{name}").strip() for name in ("max", "current"))
        if limit.isdigit() and used.isdigit():
            # files in the page cache count as used, and go when memory is asked for
            cached = re.findall(r"^(?:in)?active_file (\d+)$", _read(folder / "memory.stat"), re.M)
            found.append(int(limit) - int(used) + sum(map(int, cached)))
        if folder == CGROUPS:
            break
    return max(min(found), 0)


def versions() -> dict[str, str]:
    found = {"moe-workbench": workbench.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        found[name] = version(name)
    return found


def git_state() -> dict[str, Any] | None:
    """Commit of the checkout that this code lies in, and whether files differ; None outside one."""
    folder = Path(workbench.__file__).parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


class PeakMemory:
    """Peak memory from `reset` on: what the CUDA allocator handed out and reserved, or on a CPU the
    process's resident set, which counts its libraries and the peers' shared pages it touched."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.kind = "CUDA allocator" if device == "cuda" else "resident set of the process (VmHWM)"

    def reset(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                self.kind += ", since its start"

    def read(self) -> tuple[int, int | None]:
        """(bytes allocated, bytes reserved or None) at the peak."""
        if self.device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found = re.search(r"^VmHWM:\s*(\d+) kB", _read("/proc/self/status"), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0, None


def _cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
