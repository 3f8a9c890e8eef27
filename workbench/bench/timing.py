"""The study's protocol: warm-ups, then windows of iterations; the slowest rank of each window.

Every step of an iteration is timed for itself; a step's figure is the median over windows of the
slowest rank's mean.

Legend: P ranks, W windows, I iterations of a window.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from workbench.bench.job import TimingProtocol
from workbench.moe.groups.peers_group import PeerGroup

Floats = npt.NDArray[np.float64]
Step = Callable[[], Any]
PERCENTILES = (20, 50, 80)
TRIES = 3
"""How often a noisy case is measured at most, as far as its time limit allows."""
AHEAD_MS = 5.0
"""For which the stream is kept busy at the start of a window, so that launches run ahead."""


class Clock:
    """Times steps by the device's events: on a CPU the process's clock, on a GPU marks in the
    stream.

    With `flush_l2` a buffer of twice the L2 cache is written before each iteration; then the ranks
    meet on the device, so that they start together; both outside of what is timed. With `graphs`
    each step is replayed from a graph of its own. Either only where the device has it: `captured`
    and `flushed_bytes` say what is done.
    """

    def __init__(self, group: PeerGroup, *, graphs: bool, flush_l2: bool) -> None:
        self.group, self.runtime = group, group.runtime
        self.name = self.runtime.clock
        self.captured = graphs and self.runtime.captures
        self.flushed_bytes = 2 * self.runtime.l2_bytes() if flush_l2 else 0
        self._flush = torch.empty(self.flushed_bytes, dtype=torch.uint8, device=group.device)

    def prepare(self, steps: Mapping[str, Step]) -> Mapping[str, Step]:
        """The steps as they are timed; they must have run before."""
        if not self.captured:
            return steps
        return dict(zip(steps, self.runtime.capture(list(steps.values())), strict=True))

    def window(self, steps: Sequence[Step], iterations: int) -> Floats:
        """ms from the start of an iteration to the end of each of its steps, [I, steps + 1], the
        first column being 0."""
        event = self.runtime.event
        rows = [[event() for _ in range(len(steps) + 1)] for _ in range(iterations)]
        self.runtime.idle(AHEAD_MS)
        for marks in rows:
            if self.flushed_bytes:
                self._flush.zero_()
            self.group.align()
            marks[0].record()
            for step, mark in zip(steps, marks[1:], strict=True):
                step()
                mark.record()
        self.group.settle("the end of a window")
        return np.array([[mark.ms_since(marks[0]) for mark in marks] for marks in rows])


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
