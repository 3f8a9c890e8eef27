"""What was timed is what was checked: the outputs and gradients of the last timed iteration."""

import math

import numpy as np
import pytest
import torch

from workbench.bench import measure
from workbench.bench.case_layers import CaseLayers
from workbench.bench.job import Settings, TimingProtocol
from workbench.bench.timing import Clock
from workbench.case import Case
from workbench.moe.groups.virtual import VirtualGroup

CASE = Case(
    backend="dist_moe",
    mode="training",
    ep=1,
    precision="bf16",
    pipeline="standard",
    F=48,
    T=17,
    D=32,
    E=4,
    K=2,
    sharedExperts=1,
)
WARMUPS, WINDOWS, ITERATIONS = 1, 2, 3
LAST = 1 + WARMUPS + WINDOWS * ITERATIONS
"""Number of the last timed iteration; the first is the one that is checked."""
CHANGED = "GateError: outputs of ranks [0] changed while they were timed"


def run(windows=WINDOWS, limit_s=math.inf):
    settings = Settings(
        protocol=TimingProtocol(warmups=WARMUPS, windows=windows, iterations=ITERATIONS)
    )
    return measure.measure_case(CASE, VirtualGroup(1), settings, limit_s)


def spoil(monkeypatch, step, at, change):
    """The outputs or gradients of iteration `at` differ; returns the count of iterations."""
    right, calls = getattr(CaseLayers, step), []

    def spoiled(self):
        right(self)
        calls.append(step)
        if len(calls) == at:
            change(self)

    monkeypatch.setattr(CaseLayers, step, spoiled)
    return calls


def other_output(layers):
    layers.y[0] = layers.y[0] + 2**-8


def other_gradient(layers):
    layers.gradients[0]["w13"] = layers.gradients[0]["w13"] * 2


@pytest.mark.parametrize(
    ("step", "change"), [("forward", other_output), ("backward", other_gradient)]
)
def test_a_change_in_the_last_timed_iteration_alone_is_caught(monkeypatch, step, change):
    monkeypatch.setattr(measure, "TRIES", 1, raising=False)
    calls = spoil(monkeypatch, step, LAST, change)
    record = run()
    assert len(calls) >= LAST
    assert (record.status, record.reason) == ("failed", CHANGED)


def test_what_runs_after_the_clock_is_not_what_was_timed(monkeypatch):
    """One more iteration is run for the times of the phases."""
    monkeypatch.setattr(measure, "TRIES", 1, raising=False)
    calls = spoil(monkeypatch, "forward", LAST + 1, other_output)
    assert run().status == "ok"
    assert len(calls) == LAST + 1


class Replays(Clock):
    """Replays into the tensors of one captured iteration, as a CUDA graph does."""

    layers: CaseLayers
    spoiled = False

    def __init__(self):
        super().__init__(VirtualGroup(1), graphs=False, flush_l2=False)
        self.captured = True

    def prepare(self, steps):
        for step in steps.values():
            step()
        kept = [[y.clone() for y in self.layers.y], self.layers.y]
        wrong = torch.full_like(kept[0][0], 7.0)

        def replay():
            kept[1][0].copy_(wrong if self.spoiled else kept[0][0])

        return dict.fromkeys(steps, replay)


@pytest.mark.parametrize("spoiled", [False, True])
def test_what_a_replayed_graph_left_is_looked_at(monkeypatch, spoiled):
    clock = Replays()
    clock.spoiled = spoiled
    made = CaseLayers.__init__

    def keep(self, *given):
        made(self, *given)
        clock.layers = self

    monkeypatch.setattr(CaseLayers, "__init__", keep)
    monkeypatch.setattr(measure, "Clock", lambda *_, **__: clock)
    record = run()
    if spoiled:
        assert (record.status, record.reason) == ("failed", CHANGED)
    else:
        assert record.status == "ok", record.reason


class Told(Clock):
    """Windows take what they are told, in ms: forward half of it, backward the other."""

    def __init__(self, *told):
        super().__init__(VirtualGroup(1), graphs=False, flush_l2=False)
        self.told = list(told)

    def window(self, steps, iterations):
        super().window(steps, iterations)
        return np.outer(np.full(iterations, self.told.pop(0)), [0, 0.5, 1])


QUIET, NOISY, WORSE = [4.0, 4.1, 5.0], [4.0, 4.0, 5.1], [4.0, 9.0, 4.0]


@pytest.mark.parametrize(
    ("tries", "used", "noisy"),
    [
        ([QUIET], 0, False),
        ([NOISY, QUIET], 1, False),
        ([WORSE, WORSE, QUIET], 2, False),
        ([WORSE, NOISY, WORSE], 1, True),
    ],
)
def test_a_noisy_case_is_measured_again(monkeypatch, tries, used, noisy):
    clock = Told(*np.ravel(tries))
    monkeypatch.setattr(measure, "Clock", lambda *_, **__: clock)
    record = run(windows=3)
    assert (record.status, record.noisy) == ("ok", noisy)
    assert clock.told == []
    assert record.iterationMS == np.median(tries[used])
    assert record.samples["statistics"]["iteration"] == pytest.approx(
        {f"p{p}": np.percentile(tries[used], p) for p in (20, 50, 80)}
    )
    # every sample of every try is there
    others = [np.array(one["iteration"]) for one in record.samples["otherTries"]]
    mine = np.array(record.samples["iteration"])
    kept = [*others[:used], mine, *others[used:]]
    for samples, windows in zip(kept, tries, strict=True):
        assert samples.tolist() == [[[ms] * ITERATIONS for ms in windows]]
    told = record.provenance["tries"]
    assert (told["count"], told["used"]) == (len(tries), used)
    assert told["noisyAbove"] == 1.25
    assert told["slowestOverMedianWindow"] == pytest.approx(
        [max(windows) / sorted(windows)[1] for windows in tries]
    )


def test_a_noisy_case_without_time_left_is_only_marked(monkeypatch):
    clock = Told(*NOISY, *QUIET)
    monkeypatch.setattr(measure, "Clock", lambda *_, **__: clock)
    record = run(windows=3, limit_s=0.0)
    assert (record.status, record.noisy, record.provenance["tries"]["count"]) == ("ok", True, 1)


def test_one_window_does_not_tell_whether_a_case_is_noisy(monkeypatch):
    monkeypatch.setattr(measure, "Clock", lambda *_, **__: Told(4.0))
    assert run(windows=1).noisy is None
