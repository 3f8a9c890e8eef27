"""The protocol: what is run how often, what is timed, and the figures made of it."""

import itertools
import time

import numpy as np
import pytest

from workbench.bench import timing as protocol
from workbench.bench.job import TimingProtocol
from workbench.errors import InputError
from workbench.moe.groups.virtual import VirtualGroup


def test_windows_iterations_and_steps(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) / 1e3)  # 1 ms a look
    calls = []

    def backward():
        calls.append("b")
        next(clock)

    steps = {"forward": lambda: calls.append("f"), "backward": backward}
    met = []
    run = protocol.Clock(VirtualGroup(1), graphs=True, flush_l2=True)
    assert (run.captured, run.flushed_bytes) == (False, 0)
    told = TimingProtocol(warmups=2, windows=3, iterations=4)
    times = protocol.measure(protocol.prepare(steps, run, told), run, told, met.append)
    assert "".join(calls) == "fb" * (2 + 3 * 4)
    assert met == ["window"] * 3
    for name, ms in (("forward", 1), ("backward", 2), ("iteration", 3)):
        assert times[name].shape == (3, 4)
        np.testing.assert_allclose(times[name], ms, rtol=1e-9)


def test_slowest_rank_of_each_window():
    samples = [[[1, 3], [5, 5]], [[4, 2], [1, 1]]]  # 2 ranks, 2 windows, 2 iterations
    assert protocol.slowest(samples).tolist() == [3, 5]
    assert protocol.statistics(samples) == pytest.approx({"p20": 3.4, "p50": 4, "p80": 4.6})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"windows": 0}, "windows=0 must be an integer of at least 1"),
        ({"iterations": 1.5}, "iterations=1.5 must be an integer of at least 1"),
        ({"warmups": -1}, "warmups=-1 must be an integer of at least 0"),
    ],
)
def test_bad_protocol(given, text):
    with pytest.raises(InputError, match=text):
        TimingProtocol(**given)


def test_the_default_is_the_study_s():
    default = TimingProtocol()
    assert (default.warmups, default.windows, default.iterations) == (10, 5, 30)
