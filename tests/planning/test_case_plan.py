"""Plans of case tables against the published capacity records and sums written out by hand."""

import numpy as np
import pandas as pd
import pytest

from workbench.case import Case, case_table
from workbench.errors import InputError
from workbench.planning.arithmetic import evenly_padded_rows, padded_rows
from workbench.planning.case_plan import CasePlans, plan_case, plan_table
from workbench.records.results import load_table
from workbench.routing import spread


def layers_of(case: Case) -> CasePlans:
    return CasePlans(table=case_table([case]))


def test_every_published_capacity_field_from_the_table():
    table = load_table()
    packing = table[table["category"] == "packing"]
    plans = plan_table(table).loc[packing.index]
    checked = 0
    for (_, row), (_, plan) in zip(packing.iterrows(), plans.iterrows(), strict=True):
        for name in plan.index.intersection(list(row["capacity"])):
            assert plan[name] == row["capacity"][name], (row["id"], name)
            checked += 1
        if row["backend"] == "dist_moe":
            assert plan["recomputedLayers"] == row["capacity"]["capacityRecomputeFlags"]
            assert plan["busiestPaddedRows"] <= plan["scratchRows"]
    assert checked == 12 * 4 + 8 * 3


def test_every_published_schedule_layer_by_layer():
    table = load_table()
    published = table[(table["category"] == "packing") & (table["backend"] == "mok")]
    assert len(published) == 8
    for _, row in published.iterrows():
        plans = layers_of(Case.from_id(row["id"]))
        scheduled = plans.padded(plans.rows.rank0)[0]
        assert scheduled.tolist() == row["capacity"]["rank0ScheduleRows"]
        assert plans.replay_rows[0].tolist() == row["capacity"]["rank0ReplayRows"]


def test_a_table_and_a_single_plan_agree():
    table = load_table().drop_duplicates("id")
    assert len(table) == 110
    plans = plan_table(table)
    for index, row in table.iterrows():
        one = plan_case(Case.from_id(row["id"])).reference
        if row["backend"] == "mok":
            assert one.retained_rows_per_layer == plans["retainedRowsPerLayer"][index]
            assert (row["mode"] == "inference") or (
                one.total_replay_rows == plans["totalReplayRows"][index]
            )
        else:
            assert one.activation_slot_bytes == plans["slotBytes"][index]
            assert one.device_scratch_bytes == plans["scratchBytes"][index]


@pytest.mark.parametrize("multiple", [1, 128, 256])
def test_even_rows_pad_like_a_list_of_experts(multiple):
    for rows in (0, 1, 7, 97, 127, 128, 129, 4096, 12289):
        for experts in (1, 3, 12):
            listed = padded_rows(spread(rows, experts), multiple)
            assert evenly_padded_rows(rows, experts, multiple) == listed


def test_the_study_s_single_layers_recompute_and_replay_nothing():
    single = load_table().query("category != 'packing' and mode == 'training'")
    plans = plan_table(single)
    assert plans["recomputedLayers"].dropna().eq(0).sum() == 27
    assert plans["totalReplayRows"].dropna().eq(0).sum() == 18


def packed(slot, factors=(2.0, 1.0, 0.5, 1.5)):
    return Case(
        backend="dist_moe",
        mode="training",
        ep=4,
        precision="bf16",
        pipeline="standard",
        category="packing",
        profile="mine",
        factors=factors,
        T=64,
        D=64,
        E=16,
        K=2,
        F=64,
        slotFactor=slot,
    )


def test_slot_is_filled_in_layer_order_by_the_fullest_rank():
    """Written out: 64 tokens, D = F = 64, top-2, so x is 8,192 B and a layer of R rows keeps
    R * (2*64 + 4*64) + 128 * 2 * 64 bytes. Rank 0 leads with factor 2, the others with 0.5."""
    x_bytes, kept = 64 * 64 * 2, lambda rows: rows * 6 * 64 + 128 * 2 * 64
    rank0 = [256, 128, 64, 192]
    others = [-(-(4 * 128 - r) // 3) for r in rank0]
    minimum, full = 4 * x_bytes, 4 * kept(128)
    for slot in (0.0, 0.3, 0.7, 1.0, 1.2, 2.0):
        capacity = -(-(minimum + int(np.ceil(slot * (full - minimum)))) // 128) * 128
        used, flags = np.zeros(2), []
        for layer in range(4):
            more = np.array([kept(rank0[layer]), kept(others[layer])])
            flags.append(bool((used + more).max() + (3 - layer) * x_bytes > capacity))
            used += x_bytes if flags[-1] else more
        saved, _, recomputed = layers_of(packed(slot)).saved
        assert recomputed[0].tolist() == flags
        assert saved.sum() == used[0]
        plan = plan_table(case_table([packed(slot)])).iloc[0]
        assert plan["slotBytes"] == capacity
        assert plan["maxSavedRankBytes"] == used.max() <= capacity
        assert plan["recomputedLayers"] == sum(flags)
    assert layers_of(packed(0.0)).saved[2].all()
    assert not layers_of(packed(2.0)).saved[2].any()


def test_the_baseline_reserves_nothing_in_advance():
    case = Case(backend="baseline", mode="training", ep=2, precision="bf16", pipeline="alltoall")
    assert plan_table(case_table([case])).iloc[0].drop("busiestPaddedRows").isna().all()
    plans = layers_of(case)
    assert plans.padded(plans.rows.rank0).tolist() == [[12288]]
    assert plan_case(case).reference is None


def test_a_case_that_our_layer_runs_has_both_plans():
    case = packed(1.5)
    plan = plan_case(case)
    assert plan.ours is not None
    assert plan.ours.rows_available == 4 * 128  # scratch at 8 times, of which EP 4 can deliver 4
    assert plan.ours.slot_bytes == 1.5 * 4 * 128 * (64 * 2 + 2 * 64 * 2)
    said = plan.explain()
    assert f"arena {plan.ours.arena_bytes:,} B per rank" in said
    assert f"{plan_table(case_table([case]))['slotBytes'].item():,.0f} B" in said
    mxfp8 = plan_case(Case.from_id("dist_moe-training-ep32-mxfp8-mega-packing-A-F3072"))
    assert mxfp8.ours is None
    assert "Our layer" not in mxfp8.explain()


def test_an_unplannable_case_is_refused_by_field_value_and_rule():
    case = Case(
        backend="dist_moe", mode="training", ep=4, precision="bf16", pipeline="standard", D=100
    )
    with pytest.raises(InputError, match="hidden_dim=100 must be divisible by 64"):
        plan_table(pd.concat([case_table([case])] * 2, ignore_index=True))


def test_explanation_states_the_published_bytes():
    said = plan_case(Case.from_id("dist_moe-training-ep32-bf16-standard-packing-A-F3072")).explain()
    assert "12,142,510,080 B" in said
    assert "5,838,471,168 B" in said
    said = plan_case(Case.from_id("mok-training-ep32-bf16-native-packing-A-F3072")).explain()
    assert "32,768" in said
    assert "81,920 rows" in said
