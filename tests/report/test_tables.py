"""Tables of the report against the published records and what is known of them."""

import json
import math

import pandas as pd
import pytest

from workbench.records.results import REFERENCE, concat
from workbench.report import tables

DOCUMENT = json.loads(REFERENCE.read_text())
CASES = {case["id"]: case for case in DOCUMENT["cases"]}

GROUPS = {
    "inference BF16 single layer": 1.09,
    "inference MXFP8 single layer": 1.29,
    "inference MXFP8 width": 1.25,
    "training BF16 single layer": 1.10,
    "training BF16 width": 1.09,
    "training BF16 packing": 1.23,
    "training MXFP8 single layer": 1.13,
    "training MXFP8 width": 1.13,
    "training MXFP8 packing": 1.37,
}
"""Geometric means that the study gives by group, to two decimals."""


def test_headline_is_the_published_one(study):
    found = tables.headline(study).set_index("group")
    total = found.loc["all pairs"]
    assert (total["pairs"], round(total["geometricMean"], 3)) == (44, 1.173)
    assert (round(total["lowest"], 3), round(total["highest"], 3)) == (1.048, 1.401)
    assert found["geometricMean"].round(2)[list(GROUPS)].to_dict() == pytest.approx(
        GROUPS, abs=0.0051
    )


def test_headline_from_the_file_alone(study):
    ratios = [
        CASES[pair["mok"]]["iterationMS"] / CASES[pair["dist"]]["iterationMS"]
        for pair in DOCUMENT["pairs"]
    ]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert tables.headline(study)["geometricMean"].iloc[-1] == pytest.approx(mean, rel=1e-12)


def test_pairs_are_the_published_66_and_44(study):
    found = tables.pairs(study)
    assert set(zip(found["id"], found["mok"], strict=True)) == {
        (pair["dist"], pair["mok"]) for pair in DOCUMENT["allPipelinePairs"]
    }
    best = found[found["fastest"]]
    assert set(zip(best["id"], best["mok"], strict=True)) == {
        (pair["dist"], pair["mok"]) for pair in DOCUMENT["pairs"]
    }
    row = found.iloc[7]
    assert row["ratio"] == CASES[row["mok"]]["iterationMS"] / CASES[row["id"]]["iterationMS"]


def test_pairs_stay_within_an_origin_and_a_device(study):
    other = study.assign(origin="measured", device="NVIDIA H200")
    other["iterationMS"] = other["iterationMS"] * study["backend"].map({"dist_moe": 3, "mok": 2})
    found = tables.pairs(concat([study, other]))
    assert len(found) == 132
    mine = found[found["origin"] == "measured"].set_index("id")["ratio"]
    theirs = found[found["origin"] == "published"].set_index("id")["ratio"]
    pd.testing.assert_series_equal(mine, theirs * 2 / 3, check_exact=False)
    assert found[found["origin"] == "measured"]["series"].str.contains("measured").all()
    means = tables.headline(concat([study, other])).set_index("group")["geometricMean"]
    published = means["all pairs (published, NVIDIA GB300)"]
    assert round(published, 3) == 1.173
    assert means["all pairs (measured, NVIDIA H200)"] == pytest.approx(published * 2 / 3)


def test_slowdown_is_over_the_same_systems_balanced_time(study):
    found = tables.single_layer(study).set_index("id")["slowdown"]
    assert len(found) == 60
    for name, value in found.items():
        base, _, rest = name.partition("single_layer-i")
        even = CASES[f"{base}single_layer-i1{rest[rest.index('-') :]}"]["iterationMS"]
        assert value == CASES[name]["iterationMS"] / even
    # 8.4813 / 1.5078 ms and 5.1113 / 1.0745 ms in the file
    assert found["dist_moe-inference-ep16-bf16-standard-single_layer-i8-F3072"] == pytest.approx(
        5.6251, abs=1e-4
    )
    assert found["dist_moe-inference-ep8-mxfp8-staged-single_layer-i8-F3072"] == pytest.approx(
        4.7570, abs=1e-4
    )


def test_slowdown_is_missing_where_no_balanced_case_is(study):
    found = tables.single_layer(study[study["imbalance"] != 1])
    assert len(found) == 40
    assert found["slowdown"].isna().all()


def test_packing_holds_the_published_capacity(study):
    found = tables.packing_plan(study).set_index("id")
    assert len(found) == 20
    for name, row in found.iterrows():
        held = CASES[name]["capacity"]
        if row["backend"] == "mok":
            assert row["retainedRowsPerLayer"] == held["retainedRowsPerLayer"]
            assert row["totalReplayRows"] == held["totalReplayRows"]
            assert math.isnan(row["slotBytes"])
        else:
            assert row["slotBytes"] == held["slotBytes"]
            assert row["scratchBytes"] == held["scratchBytes"]
            assert row["savedRank0Bytes"] == held["savedRank0Bytes"]
            assert row["recomputedLayers"] == held["capacityRecomputeFlags"] == 0
            assert math.isnan(row["totalReplayRows"])
    bf16 = found.loc["dist_moe-training-ep32-bf16-standard-packing-A-F3072"]
    assert bf16["scratchUsedBytes"] == 92160 * 59392  # the largest layer, 7.5 x 12,288 rows


def test_packing_layers_schedule_what_mok_schedules(study):
    found = tables.packing_layers(study)
    assert len(found) == 40
    for (ep, profile), rows in found.groupby(["ep", "profile"]):
        held = CASES[f"mok-training-ep{ep}-bf16-native-packing-{profile}-F3072"]["capacity"]
        assert rows["scheduledRows"].tolist() == held["rank0ScheduleRows"]
        assert rows["replayedRows"].tolist() == held["rank0ReplayRows"]
        assert set(rows["retainedRows"]) == {held["retainedRowsPerLayer"]}
        assert rows["factor"].tolist() == DOCUMENT["meta"]["profiles"][profile]
        assert set(rows["scratchRows"]) == {8 * 12288}
    assert found["rows"].iloc[0] == 92160


def test_layers_of_different_shapes_are_kept_apart(study):
    found = tables.packing_layers(concat([study, study.assign(T=512)]))
    assert len(found) == 80
    loads = found[found["layer"] == 1].groupby("workload")["rows"].first()
    assert loads["EP 32, profile A, T 512"] == 7.5 * 512 * 6
    assert loads["EP 32, profile A, T 2048"] == 92160


def test_packing_of_a_shape_that_dist_moe_refuses_has_no_plan(study):
    odd = study[study["category"] == "packing"].assign(D=7001)
    found = tables.packing_plan(odd)
    dist = found["backend"] == "dist_moe"
    assert found.loc[dist, "slotBytes"].isna().all()
    assert (found.loc[~dist, "retainedRowsPerLayer"] == 32768).all()


def test_roofline_points_restate_the_published_rates(study):
    from workbench.hardware import load_hardware

    found = tables.roofline(study, load_hardware("GB300"))
    assert (found["TFLOPs"] / found["usefulTFPerGPU"] - 1).abs().max() < 1e-12
    intensity = found["usefulTFPerGPU"] * 1e3 / found["modeledHBMGBps"]
    assert (found["intensity"] / intensity - 1).abs().max() < 1e-12
    assert found["busiestFloorFraction"].between(0.3, 0.66).all()


def test_wire_model_is_within_four_percent_of_the_counters(study):
    assert tables.rates(study)["wireRatio"].sub(1).abs().max() < 0.041


def test_key_numbers_of_the_study(study):
    numbers = tables.key_numbers(study)
    assert [number for number, _ in numbers] == ["1.173", "1,477", "2,196", "4.8 to 6.4"]
    assert "geometric mean of 44 pairs (1.048 to 1.401)" in numbers[0][1]
    packing = [
        CASES[pair["mok"]]["iterationMS"] / CASES[pair["dist"]]["iterationMS"]
        for pair in DOCUMENT["pairs"]
        if "packing" in pair["mok"]
    ]
    mean = math.prod(packing) ** (1 / len(packing))
    found = tables.key_numbers(study[study["category"] == "packing"])
    assert [number for number, _ in found] == [f"{mean:.3f}"]


def test_series_are_named_by_what_differs(study):
    assert set(tables.with_series(study, axes=["F"])["series"]) == {
        "dist_moe standard BF16",
        "dist_moe staged MXFP8",
        "dist_moe mega MXFP8",
        "mok native BF16",
        "mok native MXFP8",
    }
    mine = study[study["backend"] == "dist_moe"].assign(
        origin="measured", device="NVIDIA H200", implementation="workbench-triton", T=512
    )
    names = set(tables.with_series(concat([study, mine]), axes=["F"])["series"])
    assert "dist_moe mega MXFP8 (published, NVIDIA GB300, T=2048)" in names
    assert "dist_moe mega MXFP8 (workbench-triton, measured, NVIDIA H200, T=512)" in names
    assert len(names) == 8


def test_tables_leave_their_argument_as_it_is(study):
    before = study.copy(deep=True)
    for function in (
        tables.pairs,
        tables.headline,
        tables.single_layer,
        tables.balanced,
        tables.width,
        tables.packing_plan,
        tables.packing_layers,
        tables.rates,
    ):
        function(study)
    pd.testing.assert_frame_equal(study, before)
