"""Nothing is timed that was not checked: a wrong output, gradient or byte fails the case."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from workbench.bench import gate, measure
from workbench.bench.case_layers import CaseLayers, SeededInputs
from workbench.bench.job import Settings, TimingProtocol
from workbench.bench.meter import between, routed_bytes
from workbench.case import Case
from workbench.moe.groups.virtual import VirtualGroup
from workbench.routing import route

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
QUICK = Settings(protocol=TimingProtocol(warmups=0, windows=1, iterations=1))


@pytest.fixture
def no_clock(monkeypatch):
    def timed(*_):
        raise AssertionError("timed though it is wrong")

    monkeypatch.setattr(measure, "measure", timed)


def run(case: Case = CASE):
    return measure.measure_case(case, VirtualGroup(1), QUICK)


@pytest.mark.parametrize("full", [True, False])
def test_right_values_pass(monkeypatch, full):
    if not full:
        monkeypatch.setattr(gate, "FULL_FLOP", 0)
    record = run()
    assert record.status == "ok", record.reason
    checked = record.provenance["checked"]
    sampled = "4 tokens and 1 expert per layer and rank, drawn by the seed"
    assert checked["checked"] == ("all" if full else sampled)
    wanted = {"y", "dx", "dscores", "dw13", "dw2"}
    assert checked["errors"].keys() == (wanted | {"shared_w13", "shared_w2"} if full else wanted)


SPOILED = {"x": "dx", "scores": "dscores", "w13": "dw13", "w2": "dw2", "shared_w2": "shared_w2"}


@pytest.mark.parametrize("name", SPOILED)
def test_a_wrong_gradient_is_not_timed(monkeypatch, no_clock, name):
    backward = CaseLayers.backward

    def spoiled(self):
        backward(self)
        self.gradients[0][name] = self.gradients[0][name] * 1.05

    monkeypatch.setattr(CaseLayers, "backward", spoiled)
    record = run()
    assert (record.status, record.iterationMS) == ("failed", None)
    told, _, rest = record.reason.partition(": relative error ")
    assert told == f"GateError: rank 0: {SPOILED[name]}"
    assert float(rest.split()[0]) == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize("spoil", [lambda y: y * 1.05, lambda y: y * torch.nan])
@pytest.mark.parametrize("full", [True, False])
def test_a_wrong_output_is_not_timed(monkeypatch, no_clock, spoil, full):
    if not full:
        monkeypatch.setattr(gate, "FULL_FLOP", 0)
    forward = CaseLayers.forward

    def spoiled(self):
        forward(self)
        self.y[0] = spoil(self.y[0])

    monkeypatch.setattr(CaseLayers, "forward", spoiled)
    record = run(replace(CASE, mode="inference"))
    assert record.status == "failed"
    assert "GateError: rank 0: y: relative error" in record.reason


def test_outputs_that_change_while_timed_fail(monkeypatch):
    forward, calls = CaseLayers.forward, []

    def drifting(self):
        forward(self)
        calls.append(0)
        if len(calls) > 1:
            self.y[0] = self.y[0] + 1

    monkeypatch.setattr(CaseLayers, "forward", drifting)
    record = run(replace(CASE, mode="inference"))
    assert record.reason == "GateError: outputs of ranks [0] changed while they were timed"


def test_a_case_that_cannot_run_is_a_record_with_its_reason():
    record = run(replace(CASE, pipeline="mega", precision="mxfp8"))
    assert (record.status, record.reason) == (
        "failed",
        "InputError: precision=mxfp8 must be bf16 here",
    )
    crowded = replace(CASE, scratchFactor=0.5)
    assert run(crowded).reason == (
        "CapacityError: rank 0: rows needed=34 must be at most rows available=17"
        " (scratch_factor=0.5); scratch_factor=1 would fit"
    )


def test_draws_depend_on_seed_and_stream_alone():
    a, b, other = SeededInputs(CASE, 3), SeededInputs(CASE, 3), SeededInputs(CASE, 4)
    assert all(torch.equal(x, y) for x, y in zip(a.expert(0, 2), b.expert(0, 2), strict=True))
    assert torch.equal(a.tokens(0)[0], b.tokens(0)[0])
    assert not torch.equal(a.tokens(0)[0], a.tokens(1)[0])
    assert not torch.equal(a.tokens(0)[0], other.tokens(0)[0])
    assert not torch.equal(a.expert(0, 2)[0], a.expert(1, 2)[0])
    w13, w2 = SeededInputs(replace(CASE, D=256, F=512), 0).expert(0, 0)
    assert w13.float().std().item() == pytest.approx(256**-0.5, rel=0.02)
    assert w2.float().std().item() == pytest.approx(512**-0.5, rel=0.02)


def test_bytes_of_routed_rows():
    # rank 0 sends 3 rows to itself and 1 to rank 1's two experts; rank 1 sends 2 to rank 0
    counts = [[2, 1, 0, 1], [0, 2, 1, 1]]
    of_ten_bytes = replace(CASE, D=5)
    inference = routed_bytes(replace(of_ten_bytes, mode="inference"), counts, [0, 0])
    assert inference.tolist() == [[60, 30], [30, 40]]
    training = routed_bytes(of_ten_bytes, counts, [0, 1])
    assert training.tolist() == [[120, 60 + 10], [60, 80 + 20]]


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("factor", [0.6, 1.0, 4.0, 7.5, 8.0])
def test_the_mean_is_the_wire_model_of_the_study(factor, mode):
    """layers * T*K*(1 - 1/ep) rows of 2D + 2D bytes, in training twice."""
    case = Case(backend="dist_moe", mode=mode, ep=8, precision="bf16", pipeline="standard")
    ids = route(T=case.T, K=case.K, E=case.E, ep=8, factor=factor).ids
    counts = np.stack([np.bincount(own.ravel(), minlength=case.E) for own in ids])
    moved = routed_bytes(case, counts, [0] * 8)
    np.fill_diagonal(moved, 0)
    rows = 2048 * 6 * (1 - 1 / 8)
    model = rows * (4 * 7168 if mode == "inference" else 8 * 7168)
    assert moved.sum() / 8 == pytest.approx(model, rel=5e-3)


def test_scale_up_and_scale_out_are_apart():
    bytes_ = np.arange(16).reshape(4, 4)
    found = between(bytes_, ["a", "a", "b", "b"])
    assert found == {
        "sentScaleUp": [1, 4, 11, 14],
        "receivedScaleUp": [4, 1, 14, 11],
        "sentScaleOut": [2 + 3, 6 + 7, 8 + 9, 12 + 13],
        "receivedScaleOut": [8 + 12, 9 + 13, 2 + 6, 3 + 7],
    }
