"""Calibration: recovers what generated the data, refuses what cannot determine it, is stored."""

import json

import numpy as np
import pytest

from workbench.errors import InputError
from workbench.hardware import load_hardware
from workbench.model.calibrate import calibrate, quantile, workloads
from workbench.model.calibration import (
    DEFAULT,
    Calibration,
    load_calibration,
    nearest,
    parameter_table,
)
from workbench.model.coefficients import CONSTANTS, PARAMETERS
from workbench.model.fit import Problem
from workbench.records.results import load_table

GB300 = load_hardware("GB300")


@pytest.fixture(scope="module")
def study():
    return load_table()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_fit_on_the_model_s_own_data_recovers_every_parameter(study, seed):
    problem = Problem.of(study, GB300, CONSTANTS)
    published = load_calibration().values
    true = np.array([published[name][slot] for name, slot in problem.slots])
    true *= np.random.default_rng(seed).uniform(0.85, 1.15, len(true))
    times = problem.predict(true[None])
    made = study.assign(
        iterationMS=times.iteration[0], forwardMS=times.forward[0], backwardMS=times.backward[0]
    )
    found = calibrate(made).values
    for (name, slot), value in zip(problem.slots, true, strict=True):
        assert found[name][slot] == pytest.approx(value, rel=0.02), (name, slot)


def test_the_packaged_calibration_is_that_of_the_published_study(study):
    packaged, again = load_calibration(), calibrate(study, source=load_calibration().source)
    found = again.model_dump()
    for name, value in packaged.model_dump().items():
        if name in ("values", "constants", "memory"):
            for key, inner in value.items():
                assert found[name][key] == pytest.approx(inner, rel=1e-4), key
        elif name == "held_out":
            for mine, other in zip(value, found[name], strict=True):
                assert other == mine | {"width": pytest.approx(mine["width"], rel=1e-3)}
        elif isinstance(value, float):
            assert found[name] == pytest.approx(value, rel=1e-3), name
        else:
            assert found[name] == value, name
    assert packaged.device == "GB300"
    assert packaged.cases == 110


def test_fitted_values_are_physical():
    values = load_calibration().values
    for name, by_slot in values.items():
        for slot, value in by_slot.items():
            assert value > 0, (name, slot)
    assert all(0.4 < e < 0.75 for e in values["flop_efficiency"].values())
    assert 0.8 < values["link_efficiency"]["all"] < 1.0
    assert all(1.6 < work < 2.05 for work in values["backward_work"].values())
    assert all(1.5 < b < 5 for b in values["grad_bytes"].values())


def test_a_file_is_read_back_as_it_was(tmp_path):
    calibration = load_calibration()
    calibration.save(tmp_path / "c.json")
    assert load_calibration(tmp_path / "c.json") == calibration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("values"), "values: Field required"),
        (lambda c: c["constants"].update(reference_F=None), "constants.reference_F=None: "),
        (lambda c: c.update(interval="wide"), "interval='wide': "),
        (lambda c: c.update(colour="red"), "colour='red': Extra inputs"),
        (lambda c: c["values"].pop("gap_ms"), "values.gap_ms is missing"),
        (lambda c: c["values"].update(speed={}), "values.speed is unknown; must be one of flop"),
        (
            lambda c: c["values"]["layer_ms"].pop("dist_moe"),
            "values.layer_ms.dist_moe is missing, which dist_moe bf16 standard needs",
        ),
        (lambda c: c["values"]["gap_ms"].update(mine=1.0), "values.gap_ms.mine is unknown"),
        (
            lambda c: c["values"]["flop_efficiency"].update({"mok bf16 native": 0}),
            "values.flop_efficiency.mok bf16 native=0 must be at least 1e-06, as it divides",
        ),
        (lambda c: c["constants"].pop("skew_onset"), "constants.skew_onset is missing"),
        (lambda c: c["constants"].update(reference_F=0.0), "constants.reference_F=0 must be at"),
        (lambda c: c["constants"].update(more=1.0), "constants.more is unknown"),
        (lambda c: c["memory"].pop("weight"), "memory.weight is missing"),
        (lambda c: c["memory"].update(weights=1.0), "memory.weights is unknown"),
        (lambda c: c["memory"].update(weight=-1.0), "memory.weight=-1.0: .* greater than or equal"),
        (lambda c: c["values"]["gap_ms"].update(all="1"), "values.gap_ms.all='1': .* valid number"),
        (lambda c: c["values"]["gap_ms"].update(all=True), "values.gap_ms.all=True: .* number"),
        (lambda c: c["ranges"][1].update(ep=[8]), r"ranges\[1\].ep\[1\]: Field required"),
        (lambda c: c["ranges"][1].update(ep=[9, 8]), r"ranges\[1\].*ep=\[9, 8\] must be the lower"),
        (lambda c: c["ranges"][0]["shapes"][0].pop(), r"ranges\[0\].shapes\[0\]: .* at least 5"),
        (
            lambda c: c["ranges"][0].update(load=[0, 1.0]),
            r"ranges\[0\].load\[0\]=0.* greater than 0",
        ),
        (lambda c: c["ranges"][0].update(shapes=[]), r"ranges\[0\].shapes.* at least 1 item"),
        (lambda c: c.pop("held_out"), "held_out: Field required"),
        (lambda c: c["held_out"][0].update(end="last"), r"held_out\[0\].end='last': .*'smallest'"),
        (lambda c: c["held_out"][0].update(ratio=0.5), r"held_out\[0\].ratio=0.5: .* equal to 1"),
        (lambda c: c["held_out"].append(c["held_out"][0]), "held_out names the smallest EP twice"),
        (
            lambda c: c["ranges"][0].update(group="x"),
            r"ranges\[0\].group='x': must be one of dist_",
        ),
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path, change, message):
    content = json.loads(DEFAULT.read_text())
    change(content)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message) as caught:
        load_calibration(path)
    assert "\n" not in str(caught.value)
    path.write_bytes(b"\xff{}")
    with pytest.raises(InputError, match="byte 0: not UTF-8 text"):
        load_calibration(path)
    path.write_text(DEFAULT.read_text().replace('"cases"', '"device": "H200", "cases"'))
    with pytest.raises(InputError, match="key 'device' must not be given twice"):
        load_calibration(path)
    with pytest.raises(InputError, match="cannot be read"):
        load_calibration(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (lambda t: t[:0], "needs measured cases; the table has none with iterationMS"),
        (lambda t: t.assign(iterationMS=np.nan), "needs measured cases"),
        (lambda t: t[t.ep == 16], "ep=16 only: at least two values .* weight_exposed, grad_bytes"),
        (lambda t: t[t.F == 3072], "F=3072 only: at least two values .* link_efficiency"),
        (lambda t: t[t.category == "width"], "imbalance=1 only: .* flop_efficiency from layer_ms"),
        (
            lambda t: (
                t[(t.pipeline == "mega") & (t["mode"] == "inference")]
                .iloc[[0, 1, 4]]
                .assign(
                    forwardMS=np.nan, iterationMS=lambda u: u.iterationMS.where(u.F < 3072, None)
                )
            ),
            "needs|only|determine",
        ),
        (lambda t: t.assign(pipeline="hyper"), "pipeline=dist_moe bf16 hyper|pipeline=.* unknown"),
        (
            lambda t: t.assign(device=["NVIDIA GB300"] * 100 + ["NVIDIA H200"] * 10),
            "device=GB300, H200 must be one",
        ),
    ],
)
def test_a_table_that_cannot_determine_the_parameters_is_refused(study, select, message):
    with pytest.raises(InputError, match=message) as caught:
        calibrate(select(study))
    assert "\n" not in str(caught.value)


def test_too_few_times_name_the_parameters(study):
    chosen = study[(study["pipeline"] == "mega") & study["id"].str.contains("inference")]
    few = chosen[chosen["id"].str.contains("ep8-.*i4-F3072|ep16-.*i1-F1536")]
    few = few.assign(forwardMS=np.nan)
    with pytest.raises(InputError, match="mxfp8 mega: 2 times cannot determine 3 parameters: flop"):
        calibrate(few)


def test_one_system_alone_can_be_calibrated(study):
    """A user's own records are of one pipeline; what they do not show stays at its prior."""
    own = study[(study["pipeline"] == "standard") & (study["mode"] == "training")]
    found = calibrate(own)
    assert [r.group for r in found.ranges] == ["dist_moe bf16 standard"]
    errors = found.predict(own)["iterationMS"].to_numpy() / own["iterationMS"].to_numpy() - 1
    assert np.abs(errors).mean() < 0.012
    assert found.values["replay_ms"] == {}
    inference = study[(study["pipeline"] == "native") & (study["mode"] == "inference")]
    assert calibrate(inference).values["replay_ms"]["mok"] == PARAMETERS["replay_ms"].mean


def test_workloads_leave_together(study):
    folds = workloads(study)
    assert len(folds) == 20
    assert np.sum(folds, axis=0).tolist() == [1] * 110
    ids = study["id"][folds[0]].str.replace("width", "single_layer")
    assert len(ids) in (5, 10, 20)


def test_quantile_is_conformal():
    assert quantile(np.array([])) == 0
    assert quantile(np.array([0.01, -0.03, np.nan])) == 0.03
    assert quantile(np.arange(1, 100) / 100) == 0.9  # the 90th of 99: ceil(100 * 0.9)


def test_nearest_calibration():
    gb300 = load_calibration()
    h200 = gb300.model_copy(update={"device": "H200"})
    assert nearest([h200, gb300], load_hardware("B200")).device == "GB300"
    assert nearest([gb300, h200], load_hardware("H100")).device == "H200"
    assert nearest([gb300, h200], load_hardware("H200")).device == "H200"


def test_parameter_table_has_a_unit_for_every_value():
    found = parameter_table(load_calibration())
    assert len(found) == 34
    assert (found["unit"].str.len() > 1).all()
    assert isinstance(load_calibration(), Calibration)
