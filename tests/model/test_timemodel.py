"""The time model against sums written out, and what must hold whatever its parameters are."""

import math
from collections import Counter

import numpy as np
import pytest

from workbench.case import Case, case_table
from workbench.hardware import load_hardware
from workbench.model.calibration import load_calibration
from workbench.model.coefficients import CONSTANTS, GROUPS, PARAMETERS, Group, slots
from workbench.model.timemodel import CaseArrays, layer_terms, overlap, predict_times
from workbench.planning.case_plan import plan_table

GB300 = load_hardware("GB300")
D, F, ROWS = 7168, 3072, 12288


def terms_of(*cases: Case):
    first = cases[0]
    group = Group(first.backend, first.precision, first.pipeline)
    return layer_terms(CaseArrays.of(case_table(list(cases))), group, GB300, CONSTANTS)


def times_of(*cases: Case, **changed):
    terms = terms_of(*cases)
    values = load_calibration().group_values(terms.group) | changed
    return predict_times(values, terms, CONSTANTS)


def case(backend="dist_moe", precision="bf16", pipeline="standard", mode="training", ep=32, **rest):
    return Case(backend=backend, precision=precision, pipeline=pipeline, mode=mode, ep=ep, **rest)


def staged(**rest):
    return case(precision="mxfp8", pipeline="staged", **rest)


def test_staged_training_written_out():
    """dist_moe MXFP8 staged, EP 64, imbalance 4: every term by hand, in ms."""
    v = load_calibration().values
    e = v["flop_efficiency"]["dist_moe mxfp8 staged"]
    rows = 4 * ROWS  # 6 experts of 8,192 rows: whole tiles of 128
    gemm = rows * 6 * D * F / 5e15 * 1e3 / e
    shared = v["shared_exposed"]["dist_moe"] * 2048 * 6 * D * F / 2.5e15 * 1e3
    hbm = 8e12 / 1e3
    params = 6 * 3 * D * F
    save = v["save_bytes"]["all but mega and mok bf16"] * rows * F / hbm
    work = gemm + shared + save + v["weight_exposed"]["dist_moe"] * params * 33 / 32 / hbm
    one_way = rows * 63 / 64 * 2 * D / 900e6 / v["link_efficiency"]["all"]
    fill = v["link_fill_ms"]["all"]
    loss = v["overlap_loss"]["all"]

    def hide(a, b):
        return (a + b + math.sqrt((a - b) ** 2 + 4 * loss**2 * a * b)) / 2

    forward = v["layer_ms"]["dist_moe"] + hide(work, 2 * one_way + fill)
    dgrad = gemm + 2 * shared
    wgrad = gemm + v["grad_bytes"]["dist_moe mxfp8 staged"] * params / hbm
    backward = v["layer_backward_ms"]["all"] + v["start_backward_ms"]["all"] + wgrad
    backward += hide(dgrad / 3, one_way + fill / 2) + hide(2 * dgrad / 3, one_way + fill / 2)
    found = times_of(staged(ep=64, imbalance=4))
    assert found.iteration[0] == pytest.approx(forward + backward, rel=1e-12)
    assert found.backward[0] == pytest.approx(backward, rel=1e-12)
    skew = v["skew_ms"]["dist_moe mxfp8 staged"] * (1 - math.exp(-1.2 * 3.5))
    assert found.forward[0] == pytest.approx(forward + skew, rel=1e-12)


def test_mok_replays_what_the_plan_says():
    """81,920 rows of rank 0 in profile A at EP 32: 20 minibatches of 4,096."""
    native = {"backend": "mok", "pipeline": "native", "category": "packing", "profile": "A"}
    terms = terms_of(case(**native))
    assert terms.minibatches.sum() == 20
    assert terms.minibatches[[0, 2]].tolist() == [59392 / 4096, 22528 / 4096]
    more = (
        times_of(case(**native), replay_ms=1.5).backward
        - times_of(case(**native), replay_ms=0.5).backward
    )
    assert more[0] == pytest.approx(20.0, rel=1e-12)
    assert terms_of(case(**native, slotFactor=7.5)).minibatches.sum() == 0
    assert terms_of(case(backend="mok", pipeline="native", imbalance=8)).minibatches.sum() == 0


def test_dist_moe_pays_for_what_its_slot_cannot_hold():
    full, small = (
        case(category="packing", profile="A", slotFactor=factor) for factor in (2.5, 0.5)
    )
    assert terms_of(full).recompute.sum() == 0
    assert terms_of(small).recompute.sum() > 5
    assert times_of(small).backward > 1.1 * times_of(full).backward
    assert times_of(small).forward == times_of(full).forward
    assert terms_of(case(imbalance=8, slotFactor=0.5)).recompute.sum() == 1
    assert terms_of(case(imbalance=8)).recompute.sum() == 0


@pytest.mark.parametrize(("precision", "pipeline"), [("bf16", "standard"), ("mxfp8", "mega")])
def test_a_single_layer_recomputes_as_its_plan_says(precision, pipeline):
    cases = [
        case(precision=precision, pipeline=pipeline, imbalance=i / 4, slotFactor=s / 4, F=F, D=D)
        for i in range(0, 33)
        for s in (0, 2, 3, 4, 5, 8, 17)
        for F, D in ((3072, 7168), (64, 64), (32, 4096))
    ]
    planned = plan_table(case_table(cases))["recomputedLayers"]
    assert terms_of(*cases).recompute.tolist() == planned.tolist()


def test_layers_of_a_table_are_kept_apart():
    packing = case(category="packing", profile="B")
    alone = [times_of(c).iteration[0] for c in (packing, case(), case(imbalance=4))]
    together = times_of(case(), packing, case(imbalance=4), packing).iteration
    assert together.tolist() == pytest.approx([alone[1], alone[0], alone[2], alone[0]], rel=1e-13)
    own = case(category="packing", profile="mine", factors=(4.0,), slotFactor=8.0)
    assert times_of(own).iteration[0] == pytest.approx(alone[2], rel=1e-13)


def test_rows_are_padded_per_expert():
    """10 local experts of 384 over 8 ranks do not exist; 97 tokens over 48 experts do."""
    terms = terms_of(case(mode="inference", ep=8, T=97))
    rows = 97 * 6
    assert terms.gemm[0] == pytest.approx(48 * 128 * 6 * D * F / 2.5e12, rel=1e-14)
    assert rows < 48 * 128
    mok = terms_of(case(backend="mok", pipeline="native", mode="inference", ep=8, T=97))
    assert mok.gemm[0] == 2 * terms.gemm[0]


def test_the_busiest_rank_is_another_one_where_rank_0_is_cold():
    terms = terms_of(case(mode="inference", ep=2, imbalance=0.5))
    assert terms.factor[0] == 1.5
    assert terms.back[0] == pytest.approx(1.5 * ROWS / 2 * 2 * D / 900e6, rel=1e-14)


@pytest.mark.parametrize("loss", [0.0, 0.12, 1.0])
def test_overlap_lies_between_the_larger_and_the_sum(loss):
    a, b = np.random.default_rng(0).uniform(0, 10, (2, 1000))
    found = overlap(a, b, loss)
    assert (found >= np.maximum(a, b) * (1 - 1e-12)).all()
    assert (found <= (a + b) * (1 + 1e-12)).all()
    assert overlap(np.array([3.0]), np.array([3.0]), loss)[0] == pytest.approx(3 * (1 + loss))
    assert overlap(np.array([3.0]), np.array([0.0]), loss)[0] == pytest.approx(3)


@pytest.mark.parametrize("group", [g for g in GROUPS if g.backend != "baseline"], ids=str)
def test_more_load_width_or_layers_take_longer(group):
    of = {"backend": group.backend, "precision": group.precision, "pipeline": group.pipeline}
    for mode in ("inference", "training"):
        loads = [case(**of, mode=mode, imbalance=i) for i in np.linspace(1.2, 16, 20).tolist()]
        widths = [case(**of, mode=mode, F=f) for f in range(256, 8193, 256)]
        for cases in (loads, widths):
            assert (np.diff(times_of(*cases).iteration) > 0).all()


def test_the_baseline_hides_nothing():
    group = Group("baseline", "bf16", "alltoall")
    assert group not in PARAMETERS["overlap_loss"].scope
    assert PARAMETERS["overlap_loss"].otherwise == 1.0


def test_parameters_are_few_and_documented():
    study = [group for group in GROUPS if group.backend != "baseline"]
    assert len(slots(study)) == 34  # 46 in the model that this one replaces
    users = [Counter(p.scope.values()) for p in PARAMETERS.values()]
    for group in study:  # parameters that it shares with no other
        own = [
            p for p, n in zip(PARAMETERS.values(), users, strict=True) if n[p.scope.get(group)] == 1
        ]
        assert len(own) <= 9
    for parameter in PARAMETERS.values():
        assert parameter.unit
        assert parameter.meaning
        assert parameter.deviation > 0
