"""Predictions: floors, intervals, what is extrapolated, other devices, memory."""

import re

import numpy as np
import pandas as pd
import pytest

from workbench.case import Case, case_table
from workbench.cli.speed import bench_predict, random_cases
from workbench.errors import InputError
from workbench.hardware import known_devices, load_hardware
from workbench.model.calibrate import calibrate
from workbench.model.calibration import load_calibration
from workbench.model.coefficients import CONSTANTS
from workbench.model.cost import cost_table
from workbench.model.fit import Problem
from workbench.model.memory import PLANNED, memory_terms
from workbench.model.prediction import REFUSALS, TIMES
from workbench.model.roofline import roofline_table
from workbench.records.results import load_table
from workbench.systems import MODES, PIPELINES

CALIBRATION = load_calibration()
HAS_BLOCK_SCALES = {"GB300", "GB200", "B300", "B200", "MI355X"}
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
    fixed = found["busiestFixedFloorMS"].to_numpy()
    binds = np.where(fixed > floors["busiestFloorMS"], "fixed", floors["busiestBinds"])
    assert found["busiestBinds"].astype(str).tolist() == binds.tolist()
    runs = found["runs"] == "yes"
    assert runs.mean() > 0.9
    assert (found["iterationMS"] > floors["busiestFloorMS"])[runs].all()


def random_of_every_kind(count, seed):
    """Cases of every system whose sizes reach far outside the records."""
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(count):
        backend = str(rng.choice(list(PIPELINES)))
        pipeline = str(rng.choice(list(PIPELINES[backend])))
        ep, K = 2 ** int(rng.integers(0, 8)), int(rng.integers(1, 17))
        E = ep * int(rng.choice([1, 2, 6, 16, 48, 384]))
        K = min(K, E)
        most = ep * min(K, E // ep) / K
        cases.append(
            Case(
                backend=backend,
                pipeline=pipeline,
                mode=str(rng.choice(MODES)),
                ep=ep,
                E=E,
                K=K,
                precision=str(rng.choice(PIPELINES[backend][pipeline])),
                T=int(2 ** rng.uniform(0, 17)),
                D=int(rng.choice([64, 512, 1000, 7168, 16384])),
                F=int(rng.choice([1, 64, 100, 2048, 3072, 65536])),
                imbalance=1.0 if ep == 1 else float(rng.uniform(0, most)),
                scratchFactor=float(rng.choice([0.5, 1, 4, 8])),
                sharedExperts=int(rng.integers(0, 3)),
            )
        )
    return case_table(cases)


def test_no_time_is_below_its_floor_and_none_is_given_where_nothing_runs():
    """20,000 cases over all devices, against reasons worked out here."""
    seen = set()
    for seed, name in enumerate(known_devices()):
        device = load_hardware(name)
        found = CALIBRATION.predict(random_of_every_kind(2500, seed), device)
        runs = (found["runs"] == "yes").to_numpy()
        seen |= set(found["runs"].astype(str).str.split(":").str[0])
        floors = found[[f"busiest{n}FloorMS" for n in ("Compute", "Hbm", "Link")]]
        most = floors[runs].max(axis=1)
        assert (found["iterationMS"][runs] >= most * (1 - 1e-12)).all()
        assert (found["iterationLowMS"][runs] >= most * (1 - 1e-12)).all()
        assert (found["iterationLowMS"] <= found["iterationMS"])[runs].all()
        assert (found["iterationMS"] <= found["iterationHighMS"])[runs].all()
        none = [*TIMES, "iterationLowMS", "iterationHighMS", "usefulTFPerGPU"]
        assert found.loc[~runs, none].isna().all(axis=None)
        assert found["busiestHbmFloorMS"].notna().all()
        mxfp8 = found["precision"] == "mxfp8"
        assert name in HAS_BLOCK_SCALES or not (mxfp8 & runs).any()
        assert not ((found["ep"] > device.scale_up_domain) & runs).any()
        assert not (found["peakAllocatedGiB"] * 2**30 > device.hbm_gb * 1e9)[runs].any()
        assert not (found["backend"] == "baseline")[runs].any()
        rows = np.rint(np.maximum(found["imbalance"], 1) * found["T"] * found["K"])
        bf16 = found["pipeline"] == "standard"
        assert not (
            bf16 & runs & (rows > found["scratchFactor"] * found["T"] * found["K"] + 1)
        ).any()
    assert seen == set(REFUSALS)


@pytest.mark.parametrize(
    ("device", "fields", "runs"),
    [
        (
            "H200",
            {"ep": 8, "precision": "bf16", "pipeline": "standard", "F": 32768},
            "memory: dist_moe bf16 standard needs",
        ),
        (
            "H200",
            {"ep": 8, "precision": "bf16", "pipeline": "standard", "mode": "inference"},
            "yes",
        ),
        ("H200", {"ep": 8}, "precision: H200 has no block-scaled matrix units for mxfp8"),
        ("MI300X", {"ep": 8}, "precision: MI300X has no block-scaled"),
        ("B200", {"ep": 16}, "domain: ep=16 leaves the peer domain of 8 GPUs"),
        ("GB300", {"ep": 128}, "domain: ep=128 leaves the peer domain of 72 GPUs"),
        (
            "GB300",
            {"scratchFactor": 4.0, "imbalance": 4.5},
            "scratch: the busiest rank receives more rows than scratchFactor=4.0 reserves",
        ),
        (
            "GB300",
            {"E": 38400, "ep": 32},
            "memory: dist_moe mxfp8 mega needs more than the 288 GB of GB300",
        ),
        ("GB300", {"F": 100}, "precision: dist_moe mxfp8 mega needs D divisible by 64, and D and"),
        ("GB300", {"T": 2**31 - 1}, "memory: needs more than 2..53 bytes"),
        (
            "H200",
            {"ep": 16, "backend": "baseline", "pipeline": "alltoall", "precision": "bf16"},
            "measurement: no record of baseline bf16 alltoall in the calibration, only of dist_moe",
        ),
    ],
)
def test_what_cannot_run_says_why_and_has_floors_but_no_time(device, fields, runs):
    case = Case(**{**KEYS, "ep": 64, **fields})
    found = CALIBRATION.predict([case], load_hardware(device)).iloc[0]
    assert re.match(runs, found["runs"]), found["runs"]
    assert np.isnan(found["iterationMS"]) == np.isnan(found["iterationHighMS"]) == (runs != "yes")
    assert found["busiestHbmFloorMS"] > 0


def test_one_token_reads_only_the_experts_that_it_is_routed_to():
    """B200, mega, EP 1, E=256, F=2048, K=8, T=1: 8 of the 256 experts; most of it is overhead."""
    found = CALIBRATION.predict(
        [Case(**KEYS | {"mode": "inference"}, ep=1, E=256, F=2048, K=8, T=1)], load_hardware("B200")
    ).iloc[0]
    D, F = 7168, 2048
    amount = 8 * 3 * D * F * 33 / 32 + 3 * D * F * 2 + 9 * F * 4 + 11 * D * 2 + 8 * 4
    assert found["busiestHbmFloorMS"] == pytest.approx(amount / 8e9, rel=1e-12)
    assert found["busiestBinds"] == "fixed"
    assert found["busiestFixedFloorMS"] > 0.5 * found["iterationMS"]
    assert found["extrapolation"] == "device, T, E, K, EP"
    assert found["iterationLowMS"] == found["busiestHbmFloorMS"]
    assert found["iterationHighMS"] > 1.1 * found["iterationMS"]


def test_intervals():
    found = one()
    assert not found["extrapolated"]
    assert found["extrapolation"] == ""
    ratio = found["iterationHighMS"] / found["iterationMS"]
    assert ratio == pytest.approx(np.exp(CALIBRATION.interval), rel=1e-12)
    assert found["iterationMS"] / found["iterationLowMS"] == pytest.approx(ratio, rel=1e-12)


SERVE = {"mode": "inference", "ep": 16}
ENDS = [
    # feature and end, and the study's cases there (one fold each), largest ratio of the rest to
    # them; a case that lies so far outside; one that lies a little farther
    ("EP", "smallest", [lambda t: t["ep"] == 8], 2, {**SERVE, "ep": 4}, {**SERVE, "ep": 3}),
    ("EP", "largest", [lambda t: t["ep"] == 64], 2, {**SERVE, "ep": 32}, {**SERVE, "ep": 48}),
    ("F", "smallest", [lambda t: t["F"] == 1536], 2, {"F": 768}, {"F": 736}),
    ("F", "largest", [lambda t: t["F"] == 6144], 2, {"F": 12288}, {"F": 12320}),
    (
        "imbalance",
        "largest",
        [lambda t: (t["imbalance"] == 8) & t["profile"].isna()],
        2,
        {"imbalance": 16.0, "scratchFactor": 32.0},
        {"imbalance": 16.1, "scratchFactor": 32.0},
    ),
    (
        "layers",
        "largest",
        [
            lambda t, p=p, b=b: (t["layers"] == 10) & (t["pipeline"] == p) & (t["precision"] == b)
            for b, p in (
                ("bf16", "standard"),
                ("mxfp8", "staged"),
                ("mxfp8", "mega"),
                ("bf16", "native"),
                ("mxfp8", "native"),
            )
        ],
        10,
        {**SERVE, "category": "packing", "profile": "x", "factors": (1.0,) * 10},
        {**SERVE, "category": "packing", "profile": "x", "factors": (1.0,) * 11},
    ),
]


@pytest.mark.parametrize(("feature", "end", "folds", "ratio", "near", "beyond"), ENDS)
def test_the_interval_is_what_holding_an_end_out_showed_and_only_so_far(
    feature, end, folds, ratio, near, beyond
):
    """Its errors are found here by the fit alone: the 90 % quantile of what was held out."""
    study = load_table()
    problem = Problem.of(study, load_hardware("GB300"), CONSTANTS)
    errors = []
    for fold in folds:
        held = fold(study).to_numpy(bool)
        assert held.any()
        errors += np.abs(
            problem.log_ratios(problem.fit(~held)[None])["iterationMS"][0, held]
        ).tolist()
    rank = min(int(np.ceil(0.9 * (len(errors) + 1))), len(errors))
    shown = max(np.sort(errors)[rank - 1], 2 * CALIBRATION.interval)
    (stated,) = [h for h in CALIBRATION.held_out if (h.feature, h.end) == (feature, end)]
    assert (stated.ratio, stated.width) == (ratio, pytest.approx(shown, rel=1e-3))

    found = one(**near)
    assert (found["runs"], found["extrapolation"]) == ("yes", feature)
    assert found["iterationHighMS"] == pytest.approx(found["iterationMS"] * np.exp(shown), rel=1e-4)
    assert found["iterationMS"] / found["iterationLowMS"] <= np.exp(shown) * (1 + 1e-4)

    found = one(**beyond)
    assert (found["runs"], found["extrapolation"]) == ("yes", feature)
    assert found["iterationHighMS"] >= found["iterationMS"] * np.exp(shown) * (1 - 1e-4)
    assert found["iterationMS"] / found["iterationLowMS"] > 1.2
    floors = ["busiestComputeFloorMS", "busiestHbmFloorMS", "busiestLinkFloorMS"]
    assert found["iterationLowMS"] == found[floors].max()


def test_ten_times_as_far_as_was_held_out_spans_from_the_floor_to_the_least_efficient_group():
    found, held_out = one(F=65536), one(F=12288)
    native = one(F=65536, backend="mok", pipeline="native")  # the same precision, hence peak
    assert found["iterationLowMS"] == found["busiestComputeFloorMS"]
    assert found["iterationHighMS"] == pytest.approx(native["iterationMS"], rel=0.01)
    width = [np.log(f["iterationHighMS"] / f["iterationLowMS"]) for f in (found, held_out)]
    assert width[0] > 5 * width[1]


def test_widths_of_several_features_add_up():
    width = {(h.feature, h.end): h.width for h in CALIBRATION.held_out}
    found = one(**SERVE | {"ep": 32, "F": 12288})
    assert np.log(found["iterationHighMS"] / found["iterationMS"]) == pytest.approx(
        width["EP", "largest"] + width["F", "largest"], rel=1e-9
    )


def test_an_end_that_was_never_held_out_is_not_trusted():
    study = load_table()
    two = calibrate(study[study["F"] > 1536])  # nothing is left to see F from, without either
    assert {h.feature for h in two.held_out} == {"EP", "imbalance", "layers"}
    found = two.predict([Case(**{**KEYS, "ep": 64, "F": 6176})]).iloc[0]
    assert found["extrapolation"] == "F"
    floors = ["busiestComputeFloorMS", "busiestHbmFloorMS", "busiestLinkFloorMS"]
    assert found["iterationLowMS"] == found[floors].max()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        ({"imbalance": 5.5, "F": 2048}, ""),
        ({"ep": 96}, "domain, EP"),
        ({"ep": 8}, "EP"),
        ({"F": 1024}, "F"),
        ({"imbalance": 9.0}, "imbalance"),
        ({"T": 4096}, "T"),
        ({"E": 256}, "E"),
        (
            {"T": 1, "D": 512, "E": 256, "K": 4, "sharedExperts": 0, "F": 64, "imbalance": 8.5},
            "T, D, E, K, sharedExperts, F, imbalance",
        ),
        ({"category": "packing", "profile": "A"}, ""),
        ({"category": "packing", "profile": "x", "factors": (1.0,) * 11}, "layers"),
        ({"category": "packing", "profile": "A", "slotFactor": 0.5}, "replay"),
    ],
)
def test_what_is_extrapolated_says_why(fields, why):
    found = one(**fields)
    assert found["extrapolated"] == bool(why)
    assert found["extrapolation"] == why


def test_replay_without_a_packing_record_is_extrapolated():
    from workbench.model.calibrate import calibrate

    study = load_table()
    without = calibrate(study[study["category"] != "packing"])
    native = {
        "backend": "mok",
        "pipeline": "native",
        "precision": "bf16",
        "mode": "training",
        "ep": 32,
        "category": "packing",
    }
    found = without.predict([Case(**native, profile="A")])
    assert found["extrapolation"].item() == "layers, replay"
    two = Case(**native, profile="two", factors=(7.0, 1.0))
    only = CALIBRATION.model_copy(
        update={"ranges": tuple(r.model_copy(update={"replay": False}) for r in CALIBRATION.ranges)}
    )
    assert only.predict([two])["extrapolation"].item() == "replay"
    assert not CALIBRATION.predict([two])["extrapolated"].item()


def test_another_device_has_its_own_floors_and_is_marked():
    cases = load_table()
    b200 = load_hardware("B200")
    cases = cases[cases["ep"] == 8]  # no more have peer access
    found = CALIBRATION.predict(cases, device=b200)
    floors = roofline_table(cases, b200)
    assert found["busiestComputeFloorMS"].to_numpy() == pytest.approx(
        floors["busiestComputeFloorMS"].to_numpy(), rel=1e-12
    )
    assert found["extrapolated"].all()
    assert set(found["extrapolation"]) == {"device"}
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
    assert np.isnan(far["iterationMS"])
    assert far["runs"] == "domain: ep=144 leaves the peer domain of 72 GPUs"
    assert nic > 1.5 * near["iterationMS"]
    assert far["extrapolated"]


def test_impossible_requests_are_refused():
    alltoall = {
        "backend": "baseline",
        "mode": "inference",
        "precision": "bf16",
        "pipeline": "alltoall",
        "ep": 8,
    }
    assert CALIBRATION.predict([Case(**alltoall)])["runs"].item().startswith("measurement: ")
    strange = load_table().assign(pipeline="hyper")
    with pytest.raises(InputError, match="hyper is unknown to the time model"):
        CALIBRATION.predict(strange)
    device = load_hardware("GB300").__class__(
        **{**load_hardware("GB300").__dict__, "nic_gbit_s": None}
    )
    far = CALIBRATION.predict([Case(**alltoall | {"ep": 144}, E=1152)], device=device).iloc[0]
    assert far["runs"].endswith("the peer domain of 72 GPUs, and GB300 has no NIC figure")
    assert np.isnan(far["busiestLinkFloorMS"])
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
