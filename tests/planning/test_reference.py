"""Memory plans against the published packing records and against values worked out by hand."""

import json
import logging
from importlib import resources
from typing import Any

import numpy as np
import pytest

from workbench.planning import arithmetic as pa
from workbench.planning.reference import (
    DistMoEConfig,
    MokConfig,
    PlanError,
    plan_dist_moe,
    plan_mok,
)
from workbench.planning.reference_table import dist_moe_table

STUDY = json.loads(
    resources.files("workbench").joinpath("data/gb300-2026-10-16.json").read_text("utf-8")
)
PACKING = [case for case in STUDY["cases"] if case["category"] == "packing"]
T, D, E, K = 2048, 7168, 384, 6
PROFILES = {
    "A": (7.5, 2.5, 4.5, 0.6, 1.8, 0.9, 2.2, 0.7, 1.6, 0.8),
    "B": (0.7, 5.8, 1.2, 0.6, 3.6, 1.0, 7.2, 0.8, 2.3, 0.7),
}


def hot_rank_rows(profile: str, ep: int) -> np.ndarray:
    """Rows per layer and local expert of rank 0: the first experts take the remainder."""
    experts = np.arange(E // ep)
    totals = np.array([round(factor * T * K) for factor in PROFILES[profile]])[:, None]
    return totals // experts.size + (experts < totals % experts.size)


def study_config(case: dict[str, Any]) -> DistMoEConfig:
    return DistMoEConfig(
        num_local_input_tokens=T,
        hidden_dim=D,
        intermediate_dim=case["F"],
        top_k=K,
        num_experts=E,
        max_moe_layers_per_activation_slot=case["layers"],
        precision=case["precision"],
        pipeline=case["pipeline"],
        device_scratch_capacity_factor=case["capacity"]["scratchFactor"],
        activation_slot_capacity_factor=case["capacity"]["slotFactor"],
    )


def small_config(**changes: Any) -> DistMoEConfig:
    values: dict[str, Any] = {
        "num_local_input_tokens": 3,
        "hidden_dim": 64,
        "intermediate_dim": 96,
        "top_k": 2,
        "num_experts": 8,
        "max_moe_layers_per_activation_slot": 5,
    }
    return DistMoEConfig(**(values | changes))


def case_id(case: dict[str, Any]) -> str:
    return case["id"]


def test_the_study_has_twenty_packing_records() -> None:
    backends = [case["backend"] for case in PACKING]
    assert (backends.count("dist_moe"), backends.count("mok")) == (12, 8)


@pytest.mark.parametrize("case", [c for c in PACKING if c["backend"] == "dist_moe"], ids=case_id)
def test_dist_moe_packing_record(case: dict[str, Any]) -> None:
    config, published = study_config(case), case["capacity"]
    plan = plan_dist_moe(config, ep_size=case["ep"])
    saved = config.saved_bytes(hot_rank_rows(case["profile"], case["ep"]))
    assert saved.shape == (10,)
    assert {
        "slotBytes": plan.activation_slot_bytes,
        "slotFactor": plan.activation_slot_capacity_factor,
        "scratchBytes": plan.device_scratch_bytes,
        "scratchFactor": plan.device_scratch_capacity_factor,
        "hostScratchBytes": plan.host_scratch_bytes,
        "slots": plan.num_activation_slots,
        "savedRank0Bytes": saved.sum(),
    } == {
        key: published[key]
        for key in published
        if key not in ("maxSavedRankBytes", "capacityRecomputeFlags", "inspectedRankLayers")
    }
    assert plan.minimum_activation_slot_bytes == 10 * T * D * 2
    # No layer was recomputed in the study, so all of it fits the slot.
    assert published["capacityRecomputeFlags"] == 0
    assert saved.sum() <= plan.activation_slot_bytes


@pytest.mark.parametrize("case", [c for c in PACKING if c["backend"] == "mok"], ids=case_id)
def test_mok_packing_record(case: dict[str, Any]) -> None:
    config = MokConfig(num_local_input_tokens=T, top_k=K)
    plan = plan_mok(config, hot_rank_rows(case["profile"], case["ep"]))
    published = case["capacity"]
    assert {
        "requestedRowsPerLayer": plan.requested_rows_per_layer,
        "retainedRowsPerLayer": plan.retained_rows_per_layer,
        "minibatchRows": plan.minibatch_rows,
        "effectiveFactor": plan.effective_factor,
        "rank0ScheduleRows": list(plan.schedule_rows),
        "rank0ReplayRows": list(plan.replay_rows),
        "totalReplayRows": plan.total_replay_rows,
    } == {
        key: published[key]
        for key in published
        if key not in ("rankLayerReplayCount", "sourcePolicyDerived")
    }


def test_small_bf16_plan_by_hand() -> None:
    plan = plan_dist_moe(small_config(device_scratch_capacity_factor=1.25), ep_size=2)
    assert plan.device_scratch_capacity_rows == 8  # 7.5 rounds up
    # x 8*64*2, gate/up and its gradient 8*192*2 each, hidden gradient 8*96*2; D < F
    assert plan.device_scratch_bytes == 1024 + 2 * 3072 + 1536
    assert plan.saved_input_bytes_per_layer == 384
    assert plan.minimum_activation_slot_bytes == plan.activation_slot_bytes == 1920
    # 6 rows: x 768, gate/up 2304, six route outputs 768
    assert plan.full_save_bytes_per_layer == 768 + 2304 + 768
    assert plan.layers == 5


def test_small_mxfp8_plan_by_hand() -> None:
    kinds = {"precision": "mxfp8", "device_scratch_capacity_factor": 2.0}
    staged = plan_dist_moe(small_config(pipeline="staged", **kinds), ep_size=4)
    mega = plan_dist_moe(small_config(pipeline="mega", **kinds), ep_size=4)
    # 12 rows and two experts: (12 + 254) // 128 * 128
    assert staged.device_scratch_capacity_rows == 256
    # per width w: column operand 256*w + 8*w, row operand 256*w + 256*4*ceil(w/32)
    x_col, h_col, h1_col = 264 * 64, 264 * 96, 264 * 192
    x_row, h_row, h1_row = 256 * (64 + 8), 256 * (96 + 12), 256 * (192 + 24)
    dense = 256 * 192 * 2 + 256 * 96 * 2
    assert staged.device_scratch_bytes == 2 * x_col + h_col + h1_col + dense + h1_row
    # D < 2F here: the gate/up gradient is wider than, or as wide as, input and hidden together
    assert x_row + h_row < h1_row
    assert mega.device_scratch_bytes == staged.device_scratch_bytes
    wide = plan_dist_moe(small_config(hidden_dim=128, pipeline="mega", **kinds), ep_size=4)
    assert wide.device_scratch_bytes == (
        2 * 264 * 128 + h_col + h1_col + dense + 256 * (128 + 16) + h_row
    )


def test_bf16_scratch_takes_the_output_gradient_only_when_it_is_wider() -> None:
    D, F = np.array([64, 128, 192]), 128
    got = pa.training_scratch_bytes(D, F, 1, False, False)
    assert got.tolist() == [128 + 1024 + 256, 256 + 1024 + 256, 384 + 1024 + 256 + 384]


def test_inference_scratch_by_hand() -> None:
    kinds = {"inference": True, "num_activation_slots": 0}
    bf16 = plan_dist_moe(small_config(**kinds), ep_size=1)
    assert bf16.device_scratch_bytes == 6 * (64 + 96 + 192) * 2
    assert (bf16.activation_slot_bytes, bf16.num_activation_slots, bf16.layers) == (0, 0, 0)
    kinds["precision"] = "mxfp8"
    staged = plan_dist_moe(small_config(pipeline="staged", **kinds), ep_size=4)
    mega = plan_dist_moe(small_config(pipeline="mega", **kinds), ep_size=4)
    assert staged.device_scratch_bytes == 256 * (96 + 12 + 2 * 192)
    assert mega.device_scratch_bytes == staged.device_scratch_bytes + 256 * (64 + 8)


def test_alignment_of_odd_sizes() -> None:
    assert pa.align_up([0, 1, 127, 128, 129]).tolist() == [0, 128, 128, 128, 256]
    assert pa.bf16_bytes(7, 97).item() == 1408  # 1358 bytes
    assert pa.mx_row_bytes(7, 96).item() == 768 + 128  # 672 + 84 bytes
    assert pa.mx_col_bytes(33, 96).item() == 3200 + 256  # 3168 + 192 bytes


def test_rows_at_factor() -> None:
    # 42 balanced rows at 2.5; one local expert can receive each of 7*3 tokens once, and so on
    rows = pa.dist_moe_rows(7, 6, np.array([1, 2, 64]), 3, 2.5, np.array([[False], [True]]))
    assert rows.tolist() == [[21, 42, 105], [128, 256, 8192]]
    assert pa.dist_moe_rows(1, 1, 1, 1, [0.49, 0.5, 1.0], False).tolist() == [0, 1, 1]


def test_slot_rounds_up_twice() -> None:
    # a tenth of 1281 is 128.1 -> 129; 1280 + 129 -> 1536
    assert pa.slot_bytes(1280, 2561, [0.0, 0.1, 1.0]).tolist() == [1280, 1536, 2688]


def test_mok_rows_by_hand() -> None:
    rows = np.array([[0, 0], [1, 256], [257, 512], [97, 0]])
    schedule = pa.mok_schedule_rows(rows)
    assert schedule.tolist() == [0, 512, 1024, 256]
    assert pa.mok_replay_rows(schedule, 512).tolist() == [0, 0, 512, 0]
    assert pa.mok_retained_rows([0, 1, 4096, 4097], 4096).tolist() == [0, 4096, 4096, 8192]


@pytest.mark.parametrize("multiple", [1, 128, 256])
def test_even_spread_equals_padding_expert_by_expert(multiple: int) -> None:
    rows, E_local = np.meshgrid([0, 1, 7, 97, 256, 7373, 92160], [1, 3, 6, 12])
    experts = np.arange(12)
    each, extra = rows[..., None] // E_local[..., None], rows[..., None] % E_local[..., None]
    counts = np.where(experts < E_local[..., None], each + (experts < extra), 0)
    assert (counts.sum(-1) == rows).all()
    got = pa.evenly_padded_rows(rows, E_local, multiple)
    np.testing.assert_array_equal(got, pa.padded_rows(counts, multiple))


def test_saved_bytes_pads_each_expert_for_mxfp8_only() -> None:
    rows = [[0, 0], [1, 0], [1, 129], [97, 7]]
    bf16 = small_config().saved_bytes(rows)
    outputs = 6 * 64 * 2
    assert bf16.tolist() == [n * 128 + n * 384 + outputs for n in (0, 1, 130, 104)]
    mxfp8 = small_config(precision="mxfp8", pipeline="mega").saved_bytes(rows)
    per_row = 64 + 2 + 96 + 3 + 384
    assert mxfp8.tolist() == [n * per_row + outputs for n in (0, 128, 384, 256)]


def test_table_equals_plans_one_by_one_and_broadcasts() -> None:
    ep, factor = np.array([[1], [2], [8]]), np.array([0.3, 1.0, 4.0])
    table = dist_moe_table(
        num_local_input_tokens=97,
        hidden_dim=192,
        intermediate_dim=96,
        top_k=3,
        num_experts=16,
        max_moe_layers_per_activation_slot=4,
        ep_size=ep,
        precision="mxfp8",
        pipeline=np.array(["mega", "staged", "mega"], dtype=object),
        device_scratch_capacity_factor=factor,
        activation_slot_capacity_factor=np.array([np.nan, 0.5, 2.0]),
    )
    for i, j in np.ndindex(3, 3):
        config = DistMoEConfig(
            num_local_input_tokens=97,
            hidden_dim=192,
            intermediate_dim=96,
            top_k=3,
            num_experts=16,
            max_moe_layers_per_activation_slot=4,
            precision="mxfp8",
            pipeline=["mega", "staged", "mega"][j],
            device_scratch_capacity_factor=float(factor[j]),
            activation_slot_capacity_factor=[None, 0.5, 2.0][j],
        )
        plan = plan_dist_moe(config, ep_size=int(ep[i, 0]))
        for name in ("device_scratch_bytes", "activation_slot_bytes", "total_virtual_bytes"):
            assert table[name].shape == (3, 3)
            assert table[name][i, j] == getattr(plan, name), (name, i, j)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts": 7}, PlanError, r"num_experts=7 must be divisible by ep_size=4$"),
        ({"precision": "fp8"}, PlanError, r"precision=fp8 must be one of bf16, mxfp8"),
        ({"pipeline": "mega"}, PlanError, r"pipeline=mega must be one of standard for"),
        ({"precision": "mxfp8"}, PlanError, r"pipeline=standard must be one of staged, mega for"),
        ({"top_k": 2.0}, TypeError, r"top_k=2.0 must be an integer"),
        ({"num_local_input_tokens": True}, TypeError, r"tokens=True must be an integer"),
        ({"inference": "no"}, TypeError, r"inference='no' must be true or false"),
        ({"hidden_dim": 2**80}, PlanError, r"must be below 2\*\*63"),
        ({"hidden_dim": 2**63}, PlanError, r"must be below 2\*\*63"),
        ({"hidden_dim": 2**40, "intermediate_dim": 2**40}, PlanError, r"more than 2\*\*53 bytes"),
        ({"activation_slot_capacity_factor": np.nan}, PlanError, r"factor=nan must be finite"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        plan_dist_moe(small_config(**changes), ep_size=4)


def test_a_table_names_its_first_bad_row() -> None:
    columns = small_config().columns() | {"hidden_dim": np.array([64, 128, 100, 7])}
    with pytest.raises(PlanError, match=r"hidden_dim=100 must be divisible by 64 \(row 2\)"):
        dist_moe_table(**columns, ep_size=2)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([[1, -2]], PlanError, "rows_per_expert=-2 must not be negative"),
        ([[1.5, 2.0]], TypeError, "must be an integer"),
        ([1, 2], PlanError, "rows_per_expert.ndim=1 must be 2"),
    ],
)
def test_bad_rows(rows: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        plan_mok(MokConfig(num_local_input_tokens=3, top_k=2), rows)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"minibatch_rows": 0}, PlanError, "minibatch_rows=0 must be positive"),
        ({"top_k": 1.0}, TypeError, "top_k=1.0 must be an integer"),
        ({"requested_capacity_factor": -1.0}, PlanError, "factor=-1.0 must be finite"),
        ({"requested_capacity_factor": np.nan}, PlanError, "factor=nan must be finite"),
    ],
)
def test_bad_mok_configurations(changes: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        MokConfig(**({"num_local_input_tokens": 3, "top_k": 2} | changes))


def test_factor_above_the_group_is_capped_aloud(caplog: pytest.LogCaptureFixture) -> None:
    config = small_config(device_scratch_capacity_factor=8.0)
    with caplog.at_level(logging.WARNING):
        plan = plan_dist_moe(config, ep_size=2)
    assert plan.device_scratch_capacity_factor == 2.0
    assert "device_scratch_capacity_factor=8 is capped at ep_size=2" in caplog.text
    assert plan.device_scratch_capacity_rows == 12


def test_dist_moe_plan_explains_itself() -> None:
    config = study_config(next(c for c in PACKING if c["pipeline"] == "standard"))
    said = plan_dist_moe(config, ep_size=32).explain()
    for text in (
        "10 layers need a slot of at least 293,601,280 B (0.273 GiB)",
        "a layer keeps 503,316,480 B",
        "The slot at factor 2.5 is 12,142,510,080 B (11.309 GiB)",
        "98,304 routed rows",
        "5,838,471,168 B (5.438 GiB)",
        "17,980,981,248 B",
        "recomputed in backward: the slot is a soft bound",
        "fatal: scratch is a hard bound",
    ):
        assert text in said
    assert "no activation slot" in plan_dist_moe(small_config(inference=True), ep_size=2).explain()
    assert "at its minimum is 1,920 B" in plan_dist_moe(small_config(), ep_size=2).explain()
    exact = plan_dist_moe(small_config(activation_slot_bytes=2000), ep_size=2)
    assert "as requested in bytes is 2,048 B" in exact.explain()


def test_mok_plan_explains_itself() -> None:
    plan = plan_mok(MokConfig(num_local_input_tokens=T, top_k=K), hot_rank_rows("A", 32))
    said = plan.explain()
    assert "30,720 rows a layer are requested and 32,768 kept" in said
    assert "2.67 x the balanced 12,288" in said
    assert "Layers 0, 2 receive more; their last 81,920 rows" in said
    calm = plan_mok(MokConfig(num_local_input_tokens=T, top_k=K), [[100] * 12])
    assert "No layer receives more" in calm.explain()
