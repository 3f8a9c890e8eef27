import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.case import PROFILES, Case, case_table, reference_matrix
from workbench.errors import InputError
from workbench.records.results import REFERENCE
from workbench.systems import PIPELINES

PUBLISHED = json.loads(REFERENCE.read_text())


def test_reference_matrix_is_the_published_one_in_its_order():
    assert [case.id for case in reference_matrix()] == [c["id"] for c in PUBLISHED["cases"]]


def test_every_published_id_gives_the_fields_of_its_case():
    for record in PUBLISHED["cases"]:
        case = Case.from_id(record["id"])
        stated = (
            "backend",
            "mode",
            "ep",
            "precision",
            "pipeline",
            "category",
            "F",
            "imbalance",
            "profile",
            "layers",
        )
        assert {n: getattr(case, n) for n in stated} == {n: record[n] for n in stated}


def test_profiles_are_the_published_ones():
    assert {k: list(v) for k, v in PROFILES.items()} == PUBLISHED["meta"]["profiles"]
    assert Case.from_id("mok-training-ep32-bf16-native-packing-B-F3072").factors == PROFILES["B"]


GOOD = {
    "backend": "dist_moe",
    "mode": "training",
    "ep": 8,
    "precision": "bf16",
    "pipeline": "standard",
}

SYSTEMS = [
    (backend, pipeline, precision)
    for backend, pipelines in PIPELINES.items()
    for pipeline, precisions in pipelines.items()
    for precision in precisions
]


@given(
    system=st.sampled_from(SYSTEMS),
    mode=st.sampled_from(["inference", "training"]),
    ep=st.sampled_from([2, 4, 8, 64]),
    local=st.integers(2, 20),
    quarters=st.integers(0, 8),
    shape=st.tuples(*[st.integers(1, 9999)] * 3),
    slot=st.sampled_from([2.5, 0, 0.5, 4]),
    profile=st.sampled_from([None, "A"]),
)
def test_id_survives_the_way_there_and_back(
    system, mode, ep, local, quarters, shape, slot, profile
):
    backend, pipeline, precision = system
    T, D, F = shape
    case = Case(
        backend=backend,
        pipeline=pipeline,
        precision=precision,
        mode=mode,
        ep=ep,
        E=ep * local,
        K=2,
        T=T,
        D=D,
        F=F,
        imbalance=quarters / 4,
        slotFactor=slot,
    )
    if profile and ep >= 8:
        case = replace(
            case, profile=profile, category="packing", imbalance=1.0, factors=(), layers=0
        )
    assert Case.from_id(case.id) == case


def test_slot_by_default_holds_one_layer_whole_and_the_study_s_packing_at_2_5():
    assert Case(**GOOD).slotFactor == 8
    assert Case(**GOOD, scratchFactor=4.0).slotFactor == 4
    assert Case(**GOOD, category="packing", profile="A").slotFactor == 2.5
    one = Case(**GOOD, scratchFactor=4.0, slotFactor=1.5)
    assert one.id.endswith("-slot1.5-scratch4")
    assert Case.from_id(one.id) == one


def test_an_id_of_another_shape_says_what_differs():
    case = Case(
        backend="baseline",
        pipeline="alltoall",
        precision="bf16",
        mode="training",
        ep=2,
        T=512,
        D=1024,
        E=32,
        K=2,
        F=256,
        sharedExperts=0,
        slotFactor=0.5,
    )
    assert case.id == (
        "baseline-training-ep2-bf16-alltoall-single_layer-i1-F256-T512-D1024-E32-K2-S0-slot0.5"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "moe"}, "backend='moe' must be one of dist_moe, mok, baseline"),
        ({"pipeline": "native"}, "pipeline of dist_moe='native' must be one of standard, staged"),
        ({"precision": "mxfp8"}, "precision of dist_moe standard='mxfp8' must be one of bf16"),
        ({"mode": "train"}, "mode='train' must be one of inference, training"),
        ({"ep": 7}, "E=384 must be divisible by ep=7"),
        ({"F": 0}, "F=0 must be at least 1"),
        ({"K": 385}, "K=385 must be at most E=384"),
        ({"imbalance": 8.5}, "imbalance=8.5 must lie between 0 and 8"),
        ({"imbalance": float("nan")}, "imbalance=nan must be finite"),
        ({"imbalance": -1.0}, "imbalance=-1.0 must lie between 0 and 8"),
        ({"ep": 1, "imbalance": 2.0}, "imbalance=2.0 must be 1 at ep=1"),
        ({"ep": 96, "imbalance": 70.0}, "imbalance=70.0 must lie between 0 and 64"),
        ({"category": "packing"}, "profile=None must be given for packing"),
        ({"profile": "A"}, "profile=A must not be given for single_layer"),
        ({"category": "packing", "profile": "C"}, "profile (or give its factors)='C' must be"),
        ({"layers": 3}, "layers=3 must be the number of layer factors, 1"),
        ({"slotFactor": -1.0}, "slotFactor=-1.0 must not be negative"),
        ({"scratchFactor": 0.0}, "scratchFactor=0.0 must be positive"),
        ({"sharedExperts": -1}, "sharedExperts=-1 must be at least 0"),
    ],
)
def test_an_impossible_case_names_field_value_and_rule(change, message):
    with pytest.raises(InputError) as error:
        Case(**{**GOOD, **change})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("text", ["", "dist_moe-training", "x" * 50, GOOD["backend"] + "-F3"])
def test_text_that_is_no_id_is_refused(text):
    with pytest.raises(InputError, match="must read"):
        Case.from_id(text)


def test_case_table_has_a_row_per_case():
    cases = reference_matrix()
    table = case_table(cases)
    assert table["id"].tolist() == [c.id for c in cases]
    assert table["factors"].tolist() == [c.factors for c in cases]
