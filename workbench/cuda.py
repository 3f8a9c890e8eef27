"""The device `cuda`: NVIDIA GPUs through torch.

Facts on torch's symmetric memory are those of torch 2.13 and 2.14. Imports torch only when used.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pynvml

from workbench.domain import Fabric, read_fabric
from workbench.errors import InputError

GPUS = Path("/proc/driver/nvidia/gpus")
"""Where the driver lists the GPUs, one entry each."""
SLOWED = {
    pynvml.nvmlClocksEventReasonSwPowerCap: "power cap",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "temperature",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "temperature (hardware)",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
}
REPLAYS = 10
"""Replays of a fresh graph before it is timed: the first uploads it."""


class CudaEvent:
    def __init__(self) -> None:
        import torch

        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())

    def ms_since(self, earlier: Any) -> float:
        return float(earlier._event.elapsed_time(self._event))


class Cuda:
    kind, executor, clock, captures, backend = "cuda", "triton", "torch.cuda.Event", True, "nccl"

    def count(self) -> int:
        """GPUs that the driver lists, of which CUDA_VISIBLE_DEVICES may leave some."""
        listed = len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        if chosen is None:
            return listed
        return min(listed, len([one for one in chosen.split(",") if one.strip()]))

    def problem(self, ranks: int) -> str | None:
        import torch

        if not torch.cuda.is_available():
            return "needs a CUDA device, and torch sees none (no driver, or a CPU build of torch)"
        seen = torch.cuda.device_count()
        return None if ranks <= seen else f"has {seen} devices here, must have ranks={ranks}"

    def select(self, index: int) -> Any:
        import torch

        seen = torch.cuda.device_count()
        if index >= seen:
            raise InputError(
                f"device=cuda:{index} must be one of the {seen} that this rank sees"
                f" (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}; leave"
                " it alike on every rank of a host, or unset)"
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def current(self) -> Any:
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    def label(self) -> str:
        import torch

        return torch.cuda.get_device_name()

    def fabric(self) -> Fabric:
        import torch

        index = torch.cuda.current_device()
        return read_fabric(index, str(torch.cuda.get_device_properties(index).uuid))

    def normal(self, seed: int, shape: Sequence[int]) -> Any:
        import torch

        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.randn(*shape, generator=generator, device="cuda")

    def to_host(self, tensor: Any) -> Any:
        return tensor.detach().cpu()

    def for_backend(self, tensor: Any) -> Any:
        return tensor

    def launch(self, where: Any, launches: Iterable[Any]) -> None:
        import torch

        from workbench.kernels.device import run

        # Triton launches on the current device, wherever the addresses it is given point.
        with torch.cuda.device(where):
            run(launches)

    def event(self) -> CudaEvent:
        return CudaEvent()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def capture(self, steps: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
        import torch

        pool, aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # what a capture may not do for the first time is done here
            for step in steps:
                step()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        replays: list[Callable[[], Any]] = []
        for step in steps:
            graph = torch.cuda.CUDAGraph()
            # other threads (NCCL's watchdog, NVML's) may call CUDA meanwhile
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step()
            replays.append(graph.replay)
        for _ in range(REPLAYS):
            for replay in replays:
                replay()
        return replays

    def l2_bytes(self) -> int:
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return int(properties.L2_cache_size)

    def idle(self, ms: float) -> None:
        import torch

        torch.cuda._sleep(int(ms * 2e6))  # cycles, at 2 GHz or somewhat below

    def reset_peak(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> tuple[int, int | None, str]:
        import torch

        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), "CUDA allocator"

    def symmetric(self, group: Any) -> "CudaSymmetric":
        return CudaSymmetric(group)

    def telemetry(self) -> dict[str, Any] | None:
        """SM and memory clock in MHz, temperature in C, power in W, and what holds clocks down;
        what the driver does not say is left out."""
        import torch

        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        named = f"GPU-{uuid.removeprefix('GPU-')}"
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        try:
            return _telemetry(pynvml.nvmlDeviceGetHandleByUUID(named.encode()))
        except pynvml.NVMLError:
            return None
        finally:
            pynvml.nvmlShutdown()


class CudaSymmetric:
    """torch's symmetric memory, and a barrier on a small buffer of its own, so that an arena is
    held by nothing but its tensor."""

    PAD_BYTES = 128

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        # not used here, and binding it has been seen to hang
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._pad = self.empty(self.PAD_BYTES)
        self._handle: Any = None

    def empty(self, nbytes: int) -> Any:
        import torch
        import torch.distributed._symmetric_memory as symmetric

        where = torch.device("cuda", torch.cuda.current_device())
        with _memory(nbytes):
            # zeroed: newer versions of torch zero the signal pad only
            return symmetric.empty(nbytes, dtype=torch.uint8, device=where).zero_()

    def exchange(self, own: Any) -> Sequence[int]:
        import torch.distributed._symmetric_memory as symmetric

        handle = symmetric.rendezvous(own, self._group)
        offset = int(getattr(handle, "offset", 0))  # bases are those of blocks, from torch 2.14 on
        return [int(base) + offset for base in handle.buffer_ptrs]

    def connect(self) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._handle = symmetric.rendezvous(self._pad, self._group)

    def barrier(self, timeout_s: float) -> None:
        self._handle.barrier(channel=0, timeout_ms=int(timeout_s * 1000))

    def unanswered(self) -> list[int]:
        """The barrier raises a word in each peer's signal pad; the peer lowers it as it comes."""
        import torch

        late = []
        # beside the stream whose barrier waits
        with torch.cuda.stream(torch.cuda.Stream()):
            for peer in range(self._size):
                if peer != self._rank:
                    pad = self._handle.get_signal_pad(peer, dtype=torch.int32)
                    if int(pad[self._rank].cpu()):
                        late.append(peer)
        return late


def _telemetry(handle: Any) -> dict[str, Any]:
    asked: dict[str, Callable[[], Any]] = {
        "clockMHz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memoryClockMHz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "temperatureC": lambda: pynvml.nvmlDeviceGetTemperature(
            handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        "powerW": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "slowedBy": lambda: ", ".join(
            slowed(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        ),
    }
    found = {}
    for name, ask in asked.items():
        with contextlib.suppress(pynvml.NVMLError):  # not said of this GPU, or not to this user
            found[name] = ask()
    return found


def slowed(reasons: int) -> tuple[str, ...]:
    """The words for NVML's mask of reasons that hold a clock down; an idle GPU's is none."""
    return tuple(word for bit, word in SLOWED.items() if reasons & bit)


@contextlib.contextmanager
def _memory(nbytes: int) -> Iterator[None]:
    """MemoryError for what torch raises where the driver has no more: a plain RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" in str(error):
            raise MemoryError(f"{nbytes:,} bytes of symmetric memory cannot be had") from error
        raise
