"""The study's protocol: warm-ups, then windows of iterations; the slowest rank of each window.

Every step of an iteration is timed for itself; a step's figure is the median over windows of the
slowest rank's mean. On a CPU the clock is the process's; on a GPU CUDA events, with the steps
captured as graphs and the L2 cache flushed before each iteration where asked for.

Legend: P ranks, W windows, I iterations of a window.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from workbench.bench.job import TimingProtocol

Floats = npt.NDArray[np.float64]
Step = Callable[[], Any]
PERCENTILES = (20, 50, 80)
TRIES = 3
"""How often a noisy case is measured at most, as far as its time limit allows."""


class CpuClock:
    """Times steps by the process's clock."""

    name = "time.perf_counter"
    flushed_bytes = 0
    captured = False

    def prepare(self, steps: Mapping[str, Step]) -> Mapping[str, Step]:
        return steps

    def window(self, steps: Sequence[Step], iterations: int) -> Floats:
        """ms from the start of an iteration to the end of each of its steps, [I, steps + 1], the
        first column being 0."""
        marks = np.empty((iterations, len(steps) + 1))
        for row in marks:
            row[0] = time.perf_counter()
            for n, step in enumerate(steps):
                step()
                row[n + 1] = time.perf_counter()
        return (marks - marks[:, :1]) * 1e3


class CudaClock:
    """Times steps by CUDA events. With `flush_l2`, writes a buffer of twice the L2 cache before
    each iteration, outside of what is timed."""

    name = "torch.cuda.Event"

    def __init__(self, *, graphs: bool, flush_l2: bool) -> None:
        self.captured = graphs
        size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self.flushed_bytes = 2 * size if flush_l2 else 0
        self._flush = torch.empty(self.flushed_bytes, dtype=torch.uint8, device="cuda")

    def prepare(self, steps: Mapping[str, Step]) -> Mapping[str, Step]:
        """The steps as replays of their graphs; they must have run before."""
        if not self.captured:
            return steps
        replays: dict[str, Step] = {}
        pool = torch.cuda.graph_pool_handle()
        for name, step in steps.items():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                step()
            replays[name] = graph.replay
        return replays

    def window(self, steps: Sequence[Step], iterations: int) -> Floats:
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
            for _ in range(iterations)
        ]
        for marks in events:
            if self.flushed_bytes:
                self._flush.zero_()
            marks[0].record()
            for step, mark in zip(steps, marks[1:], strict=True):
                step()
                mark.record()
        torch.cuda.synchronize()
        return np.array([[marks[0].elapsed_time(mark) for mark in marks] for marks in events])


Clock = CpuClock | CudaClock


def make_clock(device: str, protocol: TimingProtocol) -> Clock:
    if device == "cuda":
        return CudaClock(graphs=protocol.graphs, flush_l2=protocol.flush_l2)
    return CpuClock()


def prepare(
    steps: Mapping[str, Step], clock: Clock, protocol: TimingProtocol
) -> Mapping[str, Step]:
    """The steps as they are timed, warmed up. They have run before, checked."""
    for _ in range(protocol.warmups):
        for step in steps.values():
            step()
    return clock.prepare(steps)


def measure(
    prepared: Mapping[str, Step],
    clock: Clock,
    protocol: TimingProtocol,
    meet: Callable[[str], None],
) -> dict[str, Floats]:
    """ms of each step, and of `iteration` from the first's start to the last's end, [W, I].

    Collective: ranks meet before each window, by `meet`. The steps are those of `prepare`.
    """
    marks = np.empty((protocol.windows, protocol.iterations, len(prepared) + 1))
    for window in marks:
        meet("window")
        window[:] = clock.window(list(prepared.values()), protocol.iterations)
    times = dict(zip(prepared, np.moveaxis(np.diff(marks, axis=2), 2, 0), strict=True))
    return times | {"iteration": marks[:, :, -1]}


def slowest(samples_PWI: npt.ArrayLike) -> Floats:
    """The slowest rank's mean of each window, [W]."""
    means_PW: Floats = np.asarray(samples_PWI, np.float64).mean(axis=2)
    return means_PW.max(axis=0)


def unevenness(samples_PWI: npt.ArrayLike) -> float:
    """The slowest window over the median one, by the slowest rank's means."""
    windows = slowest(samples_PWI)
    return float(windows.max() / np.median(windows))


def statistics(samples_PWI: npt.ArrayLike) -> dict[str, float]:
    """p20, p50 and p80 over windows of the slowest rank's mean."""
    found = np.percentile(slowest(samples_PWI), PERCENTILES)
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
