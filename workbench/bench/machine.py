"""What a measurement was made on and with, beside its device: versions, git state, free memory."""

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


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
