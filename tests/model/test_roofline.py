import math
from dataclasses import replace

import numpy as np
import pytest

from workbench.case import Case, case_table
from workbench.errors import InputError
from workbench.hardware import load_hardware
from workbench.model.roofline import attainable_tflops, link_ms, roofline_table
from workbench.records.results import load_table

GB300 = load_hardware("GB300")


def by_id(**fields):
    return roofline_table(case_table([Case(**fields)]), GB300).iloc[0]


def test_floors_of_a_published_case_worked_out_by_hand():
    """dist_moe MXFP8 inference, EP 8, imbalance 8: rank 0 receives all 98,304 rows."""
    table = load_table()
    case = table[table["id"] == "dist_moe-inference-ep8-mxfp8-mega-single_layer-i8-F3072"]
    found = roofline_table(case, GB300).iloc[0]
    D, F, rows = 7168, 3072, 98304
    routed, shared = 12288 * 6 * D * F, 2048 * 6 * D * F
    assert found["computeFloorMS"] == pytest.approx(routed / 5e12 + shared / 2.5e12, rel=1e-14)
    assert found["busiestComputeFloorMS"] == pytest.approx(
        8 * routed / 5e12 + shared / 2.5e12, rel=1e-14
    )
    weights = 48 * 3 * D * F * 33 / 32
    fixed = 3 * D * F * 2 + 2048 * F * 4 + 3 * 2048 * D * 2 + 2048 * 6 * 4
    assert found["hbmFloorMS"] == pytest.approx(
        (weights / 8 + fixed + 12288 * (F * 4 + D * 2)) / 8e9, rel=1e-14
    )
    assert found["busiestHbmFloorMS"] == pytest.approx(
        (weights + fixed + rows * (F * 4 + D * 2)) / 8e9, rel=1e-14
    )
    # Rank 0 dispatches nothing to others (all its rows are its own) and returns 7/8 of 98,304.
    assert found["busiestLinkFloorMS"] == pytest.approx(rows * 7 / 8 * 2 * D / 900e6, rel=1e-14)
    assert found["busiestBinds"] == "compute"
    assert found["busiestFloorFraction"] == pytest.approx(
        found["busiestComputeFloorMS"] / case["iterationMS"].item(), rel=1e-14
    )
    assert math.isnan(found["ceilingFraction"])


def test_no_published_case_beats_its_floor():
    found = roofline_table(load_table(), GB300)
    assert found["busiestFloorFraction"].between(0.3, 0.7).all()
    assert (found["busiestFloorMS"] >= found["floorMS"]).all()


@pytest.mark.parametrize(
    ("change", "binds"), [({}, "compute"), ({"F": 64}, "link"), ({"T": 8}, "HBM")]
)
def test_which_floor_binds(change, binds):
    system = {
        "backend": "dist_moe",
        "mode": "inference",
        "ep": 16,
        "precision": "bf16",
        "pipeline": "standard",
    }
    found = by_id(**system, **change)
    assert found["binds"] == binds
    floors = {
        "compute": found["computeFloorMS"],
        "HBM": found["hbmFloorMS"],
        "link": found["linkFloorMS"],
    }
    assert found["floorMS"] == floors[binds] == max(floors.values())
    assert "iterationMS" not in found.index
    assert math.isnan(found["floorFraction"])


def test_a_measured_ceiling_is_used_where_there_is_one():
    table = load_table().iloc[[0]]
    b200 = load_hardware("B200")
    found = roofline_table(table, b200).iloc[0]
    flop = (12288 + 2048) * 6 * 7168 * 3072
    ms = table["iterationMS"].item()
    assert found["ceilingFraction"] == pytest.approx(flop / 1745e9 / ms, rel=1e-14)


def test_link_has_two_levels_beyond_the_domain():
    ep = np.array([8, 72, 73, 144])
    ms = link_ms(np.full(4, 9e9), ep, GB300)
    assert ms[:2].tolist() == [10.0, 10.0]
    assert ms[2] == pytest.approx(10 * 71 / 72)  # 1 of 72 peers is outside: 1.25 ms on the NIC
    assert ms[3] == pytest.approx(9e9 * 72 / 143 / 100e6)  # 800 Gbit/s = 100 GB/s
    without = replace(GB300, nic_gbit_s=None)
    assert np.isnan(link_ms(np.full(4, 9e9), ep, without)).tolist() == [False, False, True, True]


def test_a_device_without_the_peak_is_refused():
    with pytest.raises(InputError, match="precision=mxfp8 must be one with a known peak"):
        roofline_table(load_table(), replace(GB300, fp8_tflops=None))


def test_roofline_bends_at_the_ridge():
    ridge = 2500 / 8
    found = attainable_tflops(np.array([1, ridge, 1000]), peak_tflops=2500, hardware=GB300)
    assert found.tolist() == [8, 2500, 2500]
