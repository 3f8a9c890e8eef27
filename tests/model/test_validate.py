"""The protocols: every gate, and two of them recomputed through the public calls alone."""

import json

import numpy as np
import pytest

from workbench.model.calibrate import calibrate
from workbench.model.validate import PROTOCOLS, validate
from workbench.records.results import load_table

GATES = {
    "leave one workload out": (0.02, 0.14),
    "the same without the smallest F": (0.015, 0.06),
    "packing of one group left out": (0.015, 0.03),
    "largest EP from the smaller": (0.03, 0.20),
    "largest F from the rest": (0.03, 0.06),
    "largest load from the smaller": (0.01, 0.035),
    "forward, leave one workload out": (0.016, 1),
    "backward, leave one workload out": (0.022, 1),
    "peak memory, in sample": (0.02, 1),
    "peak memory, leave one workload out": (0.05, 1),
}
CASES = {
    "largest EP from the smaller": 40,
    "packing of one group left out": 20,
    "largest F from the rest": 10,
    "largest load from the smaller": 20,
    "the same without the smallest F": 100,
    "backward, leave one workload out": 65,
}


@pytest.fixture(scope="module")
def validation():
    return validate(load_table())


@pytest.mark.parametrize("protocol", GATES)
def test_gate(validation, protocol):
    found = validation.protocols.set_index("protocol").loc[protocol]
    mean, worst = GATES[protocol]
    assert 0 < found["mean"] <= mean
    assert found["mean"] <= found["worst"] <= worst
    assert found["cases"] == CASES.get(protocol, 110)
    assert found["gateMet"]


def test_gates_and_goals_are_those_that_were_set():
    stated = {p.name: (p.gate.mean, p.gate.worst or 1) for p in PROTOCOLS if p.gate.mean}
    assert stated == GATES
    for p in PROTOCOLS:
        if p.goal.mean:
            assert p.goal.mean < p.gate.mean


def test_coverage_of_the_interval(validation):
    assert 0.85 <= validation.coverage <= 0.97
    assert validation.coverage_beyond >= 0.85
    assert 0.02 < validation.median_width < 0.08
    assert validation.passed


@pytest.mark.parametrize(
    ("protocol", "hold"),
    [
        ("largest EP from the smaller", lambda t: t["ep"] == 64),
        ("largest F from the rest", lambda t: t["F"] == 6144),
        ("leave one workload out", lambda t: t["id"].str.contains("training-ep64-.*F1536")),
    ],
)
def test_protocol_recomputed_through_calibrate_and_predict(validation, protocol, hold):
    table = load_table()
    held = hold(table).to_numpy()
    predicted = calibrate(table[~held]).predict(table[held])["iterationMS"].to_numpy()
    errors = predicted / table["iterationMS"].to_numpy()[held] - 1
    assert validation.cases[protocol].to_numpy()[held] == pytest.approx(errors, abs=2e-4)
    if protocol != "leave one workload out":
        found = validation.protocols.set_index("protocol").loc[protocol]
        assert found["mean"] == pytest.approx(np.abs(errors).mean(), abs=2e-4)


def test_a_model_that_has_seen_nothing_like_it_fails_a_gate():
    """Times that do not follow the model: the check can fail."""
    table = load_table()
    wrong = table.assign(iterationMS=table["iterationMS"] * (1 + 0.3 * (table["ep"] == 64)))
    found = validate(wrong)
    assert not found.passed
    rows = found.protocols.set_index("protocol")
    assert not rows.loc["largest EP from the smaller", "gateMet"]


def test_json_has_every_protocol_and_group(validation):
    found = json.loads(validation.to_json())
    assert [row["protocol"] for row in found["protocols"]] == [p.name for p in PROTOCOLS]
    assert len(found["groups"]) == 5 * len(PROTOCOLS)
    assert found["passed"] is True
    assert found["fits"] == 29


def test_a_table_without_packing_or_third_sizes_leaves_those_protocols_out():
    table = load_table()
    small = table[(table["category"] != "packing") & (table["ep"] < 32) & (table["F"] < 6144)]
    rows = validate(small).protocols.set_index("protocol")
    for name in (
        "packing of one group left out",
        "largest EP from the smaller",
        "largest F from the rest",
        "backward, leave one workload out",
    ):
        assert rows.loc[name, "cases"] == 0
        assert rows.loc[name, "gateMet"]
    assert rows.loc["leave one workload out", "cases"] > 30


def test_what_lies_beyond_is_held_against_twice_the_interval(validation, monkeypatch):
    beyond = (
        "largest EP from the smaller",
        "largest F from the rest",
        "largest load from the smaller",
    )
    errors = np.log1p(validation.cases[list(beyond)].to_numpy(float))
    errors = np.abs(errors[np.isfinite(errors)])
    single = np.log1p(validation.cases["leave one workload out"].to_numpy(float))
    count = np.isfinite(single).sum()
    interval = np.sort(np.abs(single[np.isfinite(single)]))[int(np.ceil(0.9 * (count + 1))) - 1]
    assert validation.coverage_beyond == pytest.approx((errors <= 2 * interval).mean())
    monkeypatch.setattr("workbench.model.validate.WIDER", 0.0)
    assert validate(load_table()).coverage_beyond == 0
