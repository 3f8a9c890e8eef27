"""Predictions: floors, intervals, what is extrapolated, other devices, memory."""

import numpy as np
import pandas as pd
import pytest

from workbench.bench.record import load_table
from workbench.case import Case
from workbench.errors import InputError
from workbench.hardware import load_hardware
from workbench.model.calibration import load_calibration
from workbench.model.cost import cost_table
from workbench.model.memory import PLANNED, memory_terms
from workbench.model.roofline import roofline_table
from workbench.speed import bench_predict, random_cases

CALIBRATION = load_calibration()
KEYS = {"backend": "dist_moe", "mode": "training", "precision": "mxfp8", "pipeline": "mega"}


def one(**fields):
    return CALIBRATION.predict([Case(**{**KEYS, "ep": 64, **fields})]).iloc[0]


def test_columns_are_the_records_own_and_nothing_measured_is_left():
    study = load_table()
    found = CALIBRATION.predict(study)
    assert found["id"].tolist() == study["id"].tolist()
    assert set(found["origin"]) == {"predicted"}
    for name in ("iterationMS", "forwardMS", "backwardMS", "usefulTFPerGPU", "peakAllocatedGiB"):
        assert not np.array_equal(found[name], study[name])
        rest = study[name].notna()
        assert (found[name].notna() == rest).all()
        assert np.abs(found[name][rest] / study[name][rest] - 1).max() < 0.09
    assert "meanTXGBps" not in found
    useful = cost_table(study)["usefulFLOP"]
    assert found["usefulTFPerGPU"].to_numpy() == pytest.approx(
        (useful / found["iterationMS"] / 1e9).to_numpy(), rel=1e-12
    )
    shuffled = CALIBRATION.predict(study.sample(frac=1, random_state=1))
    pd.testing.assert_series_equal(shuffled["iterationMS"].sort_index(), found["iterationMS"])


def test_floors_are_the_roofline_s_on_random_cases():
    table = random_cases(3000)
    found, floors = CALIBRATION.predict(table), roofline_table(table, load_hardware("GB300"))
    for name in ("busiestComputeFloorMS", "busiestHbmFloorMS", "busiestLinkFloorMS"):
        assert found[name].to_numpy() == pytest.approx(floors[name].to_numpy(), rel=1e-12)
    assert found["busiestBinds"].astype(str).tolist() == floors["busiestBinds"].tolist()
    assert (found["iterationMS"] > floors["busiestFloorMS"]).all()


def test_intervals():
    found = one()
    assert not found["extrapolated"]
    assert found["extrapolation"] == ""
    ratio = found["iterationHighMS"] / found["iterationMS"]
    assert ratio == pytest.approx(np.exp(CALIBRATION.interval), rel=1e-12)
    assert found["iterationMS"] / found["iterationLowMS"] == pytest.approx(ratio, rel=1e-12)
    far = one(F=12288)
    assert far["iterationHighMS"] / far["iterationMS"] >= 1.9 * (ratio - 1) + 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        ({"imbalance": 5.5, "F": 2048}, ""),
        ({"ep": 128}, "ep outside the records"),
        ({"ep": 8}, "ep outside the records"),
        ({"F": 1024}, "F outside the records"),
        ({"imbalance": 9.0}, "load outside the records"),
        ({"T": 4096}, "shape without a record"),
        ({"E": 256}, "shape without a record"),
        ({"category": "packing", "profile": "A"}, ""),
        ({"category": "packing", "profile": "x", "factors": (1.0,) * 11}, "more layers"),
        ({"category": "packing", "profile": "A", "slotFactor": 0.5}, "replay or recomputation"),
    ],
)  # fmt: skip
def test_what_is_extrapolated_says_why(fields, why):
    found = one(**fields)
    assert found["extrapolated"] == bool(why)
    assert found["extrapolation"].startswith(why)


def test_replay_without_a_packing_record_is_extrapolated():
    from workbench.model.calibrate import calibrate

    study = load_table()
    without = calibrate(study[study["category"] != "packing"])
    native = {"backend": "mok", "pipeline": "native", "precision": "bf16", "mode": "training",
              "ep": 32, "category": "packing"}  # fmt: skip
    found = without.predict([Case(**native, profile="A")])
    assert found["extrapolation"].item() == "more layers than in any record"
    two = Case(**native, profile="two", factors=(7.0, 1.0))
    only = CALIBRATION.model_copy(
        update={"ranges": tuple(r.model_copy(update={"replay": False}) for r in CALIBRATION.ranges)}
    )
    assert only.predict([two])["extrapolation"].item().startswith("replay or recomputation")
    assert not CALIBRATION.predict([two])["extrapolated"].item()


def test_another_device_has_its_own_floors_and_is_marked():
    cases = load_table()
    b200 = load_hardware("B200")
    found = CALIBRATION.predict(cases, device=b200)
    floors = roofline_table(cases, b200)
    assert found["busiestComputeFloorMS"].to_numpy() == pytest.approx(
        floors["busiestComputeFloorMS"].to_numpy(), rel=1e-12
    )
    assert found["extrapolated"].all()
    assert set(found["extrapolation"]) == {"device without calibration"}
    assert set(found["calibratedOn"]) == {"GB300"}
    assert set(found["device"]) == {"B200"}
    slower = (found["iterationMS"] / CALIBRATION.predict(cases)["iterationMS"])[cases["ep"] == 8]
    assert slower.between(1.0, 2500 / 2250).all()
    assert slower.max() > 1.1


def test_beyond_the_domain_the_link_has_two_levels():
    """EP 144 on NVL72: 72 of 143 peers are reached through the NIC at 100 GB/s, ninefold slower."""
    shape = {"E": 1152, "F": 1536, "K": 6}
    near, far = (one(ep=ep, **shape) for ep in (72, 144))
    nic = 12288 * (1 - 1 / 144) * 4 * 2 * 7168 * 72 / 143 / 100e6
    assert far["busiestLinkFloorMS"] == pytest.approx(nic, rel=1e-9)
    assert far["busiestBinds"] == "link"
    assert far["iterationMS"] > nic > 1.5 * near["iterationMS"]
    assert far["extrapolated"]


def test_impossible_requests_are_refused():
    alltoall = {"backend": "baseline", "mode": "inference", "precision": "bf16",
                "pipeline": "alltoall", "ep": 8}  # fmt: skip
    with pytest.raises(InputError, match="baseline bf16 alltoall has no record in the calibration"):
        CALIBRATION.predict([Case(**alltoall)])
    strange = load_table().assign(pipeline="hyper")
    with pytest.raises(InputError, match="hyper is unknown to the time model"):
        CALIBRATION.predict(strange)
    device = load_hardware("GB300").__class__(
        **{**load_hardware("GB300").__dict__, "nic_gbit_s": None}
    )
    with pytest.raises(InputError, match="ep=144 leaves the peer-access domain of 72 GPUs"):
        CALIBRATION.predict([Case(**KEYS, ep=144, E=1152)], device=device)
    assert len(CALIBRATION.predict(load_table()[:0])) == 0


def test_memory_constants_are_the_sizes_of_the_types():
    found = CALIBRATION.memory
    assert found["weight"] == pytest.approx(2, rel=0.01)
    assert found["gradient"] == pytest.approx(4, rel=0.01)
    assert found["mxfp8_copies_dist_moe"] == pytest.approx(33 / 32, rel=0.01)
    assert found["mxfp8_copies_mok"] == pytest.approx(2 * 33 / 32, rel=0.03)


def test_memory_terms_add_up_and_the_planned_ones_are_the_plan_s():
    table = load_table()
    terms = memory_terms(table, CALIBRATION.memory)
    predicted = CALIBRATION.predict(table)["peakAllocatedGiB"]
    assert terms.sum(axis=1).to_numpy() == pytest.approx(predicted.to_numpy(), rel=1e-12)
    packing = (table["category"] == "packing") & (table["pipeline"] == "standard")
    assert terms["slot"][packing].to_numpy() == pytest.approx(12_142_510_080 / 2**30, rel=1e-12)
    assert terms["scratch"][packing].to_numpy() == pytest.approx(98304 * 59392 / 2**30, rel=1e-12)
    assert (terms.loc[table["backend"] == "mok", list(PLANNED)] == 0).all(axis=None)
    weights = terms["weight"] / terms["gradient"].where(table["mode"] == "training")
    assert weights.dropna().between(0.49, 0.51).all()


def test_bench_predict_reports_its_figures():
    found = bench_predict(cases=2000, repeats=2)
    assert found["cases"] == 2000
    assert 0 < found["predict_s"] <= found["predict_worst_s"]
