"""What everything else asks of the device that ranks run on: one interface, with `cpu` here and
`cuda` in `workbench.cuda` behind it.

WORKBENCH_DEVICES names modules with a constant DEVICES that add others by kind; a kind is also the
type of the device's tensors in torch. Nothing outside asks what kind a device is in order to reach
for torch.cuda, and nothing reads a device's memory but through `to_host`.
"""

import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import psutil

from workbench.domain import Fabric, this_host
from workbench.errors import InputError
from workbench.extensions import added


class Event(Protocol):
    """A mark in the device's stream."""

    def record(self) -> None:
        """Sets the mark behind all that is queued."""

    def done(self) -> bool:
        """Whether the device has come to the mark; does not wait."""

    def ms_since(self, earlier: "Event") -> float:
        """Between two recorded marks that the device has passed, known by `synchronize`."""


class Symmetric(Protocol):
    """Memory of a group's ranks that all of them reach by address, and its barrier."""

    def empty(self, nbytes: int) -> Any:
        """This rank's zeroed uint8 [nbytes]; local. Raises MemoryError."""

    def exchange(self, own: Any) -> Sequence[int]:
        """Address of each rank's, as this rank reaches it; collective."""

    def connect(self) -> None:
        """Makes the barrier; collective, before the first."""

    def barrier(self, timeout_s: float) -> None:
        """Queues the meeting of all ranks on the current stream; the host goes on. After
        `timeout_s` of waiting the device gives up, and with it the process."""

    def unanswered(self) -> list[int]:
        """The ranks that have not come to the barrier that this one waits at."""


class Runtime(Protocol):
    """One kind of device. A rank uses one device of its host, the one that it `select`ed."""

    kind: str
    executor: str
    """That our layer runs with, and that its times are of."""
    clock: str
    """What an `Event` is, for the record."""
    captures: bool
    """Whether steps can be held as graphs."""
    backend: str
    """torch.distributed's backend for its tensors."""

    def count(self) -> int:
        """Ranks that this host has devices for; imports no torch."""

    def problem(self, ranks: int) -> str | None:
        """Why this host cannot run so many ranks, in one line; starts nothing."""

    def select(self, index: int) -> Any:
        """The torch device of this process from now on, number `index` of the host's."""

    def current(self) -> Any:
        """The torch device that was selected last, or the first."""

    def label(self) -> str:
        """By the name that its driver gives it."""

    def fabric(self) -> Fabric:
        """What this rank shares with others, as far as the driver says."""

    def normal(self, seed: int, shape: Sequence[int]) -> Any:
        """Standard normal float32 on the device; the same for a seed on one kind of device."""

    def to_host(self, tensor: Any) -> Any:
        """The tensor in host memory, when all that was queued before is done; never in a capture.
        On a CPU the tensor itself."""

    def for_backend(self, tensor: Any) -> Any:
        """The tensor as `backend` takes it; shares its memory."""

    def launch(self, where: Any, launches: Iterable[Any]) -> None:
        """Queues kernels (`kernels.device.Launch`) on torch device `where`, in order."""

    def event(self) -> Event:
        """A new mark, not set yet."""

    def synchronize(self) -> None:
        """Returns when all that was queued is done."""

    def capture(self, steps: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
        """Each step, which has run before, as the replay of a graph; in one memory pool."""

    def l2_bytes(self) -> int:
        """Size of the cache that is flushed between iterations; 0 for none."""

    def idle(self, ms: float) -> None:
        """Keeps the stream busy, so that what is queued behind runs without gaps."""

    def reset_peak(self) -> None:
        """Starts the count of `peak` anew."""

    def peak(self) -> tuple[int, int | None, str]:
        """(bytes handed out, bytes reserved or None, what they count) at most since `reset_peak`;
        without symmetric memory."""

    def symmetric(self, group: Any) -> Symmetric:
        """For a `torch.distributed` group; local, `connect` is what meets the others."""

    def telemetry(self) -> dict[str, Any] | None:
        """Clocks, temperature and power as they are now, None where nobody knows."""


class _CpuEvent:
    def record(self) -> None:
        self.at = time.perf_counter()

    def done(self) -> bool:
        return True

    def ms_since(self, earlier: Any) -> float:
        return float(self.at - earlier.at) * 1e3


class Cpu:
    """The host's own cores: everything is done when the call returns."""

    kind, executor, clock, captures, backend = "cpu", "torch", "time.perf_counter", False, "gloo"

    def count(self) -> int:
        return max(len(os.sched_getaffinity(0)), 2)

    def problem(self, ranks: int) -> str | None:
        return None

    def select(self, index: int) -> Any:
        return self.current()

    def current(self) -> Any:
        import torch

        return torch.device("cpu")

    def label(self) -> str:
        """A CPU says that it is one, and its cores."""
        found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
        name = found[1].strip() if found else platform.machine()
        cores = len(os.sched_getaffinity(0))
        return f"CPU {name}, {cores} core{'s' * (cores != 1)}"

    def fabric(self) -> Fabric:
        return this_host()

    def normal(self, seed: int, shape: Sequence[int]) -> Any:
        import torch

        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    def to_host(self, tensor: Any) -> Any:
        return tensor

    def for_backend(self, tensor: Any) -> Any:
        return tensor

    def launch(self, where: Any, launches: Iterable[Any]) -> None:
        from workbench.kernels.device import run

        run(launches)

    def event(self) -> Event:
        return _CpuEvent()

    def synchronize(self) -> None:
        """Nothing was queued."""

    def capture(self, steps: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
        raise InputError("graphs=True must not be asked for on device='cpu'")

    def l2_bytes(self) -> int:
        return 0

    def idle(self, ms: float) -> None:
        """There is no stream to fill."""

    def reset_peak(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._since = ""
        except OSError:
            self._since = ", since its start"

    def peak(self) -> tuple[int, int | None, str]:
        """The resident set counts the process's libraries, and peers' pages that it touched."""
        found = re.search(r"^VmHWM:\s*(\d+) kB", _read("/proc/self/status"), re.MULTILINE)
        kind = f"resident set of the process (VmHWM){self._since}"
        return int(found[1]) * 1024 if found else 0, None, kind

    def symmetric(self, group: Any) -> Symmetric:
        raise InputError("symmetric memory needs a GPU; on device='cpu' use group='shared'")

    def telemetry(self) -> dict[str, Any] | None:
        found = [core.current for core in psutil.cpu_freq(percpu=True)]
        return {"clockMHz": max(found)} if found else None


@cache
def runtimes() -> dict[str, Runtime]:
    """Every kind of device by its name. Raises InputError for a module of the environment's that
    adds none."""
    from workbench.cuda import Cuda

    known: dict[str, Any] = {"cpu": Cpu(), "cuda": Cuda()}
    return added("DEVICES", known, of=object)


def find_runtime(kind: str) -> Runtime:
    """Raises InputError."""
    known = runtimes()
    if kind not in known:
        raise InputError(f"device={kind!r} must be one of {', '.join(known)}")
    return known[kind]


def to_host(tensor: Any) -> Any:
    """A tensor of any device in host memory: the one way in which a device's memory is read."""
    return find_runtime(tensor.device.type).to_host(tensor)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
