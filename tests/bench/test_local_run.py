"""The local matrix on real ranks: what was recorded, against what can be worked out without it."""

import json

import numpy as np
import pytest

from workbench.case import Case, case_table
from workbench.model.cost import cost_table
from workbench.moe.arena import plan_ours
from workbench.moe.config import MoEConfig
from workbench.records.results import export_results, load_table
from workbench.report.study_report import ReportParameters, open_report
from workbench.routing import case_routes, rows_by_rank

PACKING_SLOTS = {2.5, 0.5}


def _rows(case: Case, layer: int) -> np.ndarray:
    """Rows from rank to rank, from the seeded ids alone."""
    ids = case_routes(case, layer, 0).ids
    owner = ids // (case.E // case.ep)
    return np.stack([np.bincount(o.ravel(), minlength=case.ep) for o in owner])


def _packed(case: Case) -> tuple[list[int], list[int]]:
    """(bytes held, layers recomputed) of each rank, worked out from the plan: a layer is kept if it
    fits the rest of the slot."""
    plan = plan_ours(MoEConfig.from_case(case))
    held, again = [0] * case.ep, [0] * case.ep
    for factor in case.factors:
        rows = rows_by_rank(T=case.T, K=case.K, ep=case.ep, factor=factor)
        for rank, received in enumerate(rows.tolist()):
            needed = plan.saved_bytes(received)
            if held[rank] + needed <= plan.slot_bytes:
                held[rank] += needed
            else:
                again[rank] += 1
    return held, again


def test_every_case_is_measured_once(local_run):
    files = [path.name for path in local_run.sweep.folder.records.iterdir()]
    assert sorted(files) == sorted(f"{c.id}.record.json" for c in local_run.sweep.cases)
    reasons = {name: r.reason for name, r in local_run.records.items() if r.status != "ok"}
    assert reasons == {}
    assert (local_run.final.done, local_run.final.failed) == (len(files), 0)


def test_the_matrix_has_what_it_should():
    from workbench.case import local_matrix

    cases = local_matrix()
    two = [case for case in cases if case.ep == 2]
    for pipeline in ("standard", "alltoall"):
        of = [case for case in two if case.pipeline == pipeline]
        assert {case.mode for case in of} == {"inference", "training"}
        assert {c.imbalance for c in of if c.category == "single_layer"} == {1.0, 2.0}
        assert len({c.F for c in of if c.category == "width"}) == 2
        packing = [c for c in of if c.category == "packing"]
        assert {(c.layers, c.mode, c.scratchFactor) for c in packing} == {(10, "training", 8.0)}
        assert {c.profile for c in packing} == {"A2", "B2"}
        slots = PACKING_SLOTS if pipeline == "standard" else {2.5}
        assert {c.slotFactor for c in packing} == slots
    assert max(max(c.factors) for c in two) <= 2
    assert len({case.id for case in cases}) == len(cases)


def test_ranks_live_for_all_cases_of_an_ep_degree(local_run):
    starts = list(local_run.sweep.folder.logs.glob("*.torchrun.log"))
    assert len(starts) == len({case.ep for case in local_run.sweep.cases}) == 2
    events = [json.loads(line) for line in local_run.sweep.folder.events.read_text().splitlines()]
    order = [(event["event"], event["case"]) for event in events]
    assert order == [(e, c.id) for c in local_run.sweep.cases for e in ("start", "end")]


def test_progress_counts_every_case_and_tells_the_time_left(local_run):
    ended = [p for p in local_run.told if p.record is not None]
    total = len(local_run.sweep.cases)
    assert [p.done for p in ended] == list(range(1, total + 1))
    assert all(p.left_s is not None and p.left_s >= 0 for p in ended)
    assert ended[-1].left_s == 0
    running = [p.running for p in local_run.told if p.record is None]
    assert running == [case.id for case in local_run.sweep.cases]


def test_samples_of_all_ranks_are_kept_and_give_the_figures(local_run):
    for case in local_run.sweep.cases:
        record = local_run.records[case.id]
        names = ["iteration", "forward"] + ["backward"] * (case.mode == "training")
        for name in names:
            samples = np.array(record.samples[name])
            assert samples.shape == (case.ep, 2, 2)
            assert (samples > 0).all()
            per_window = [max(rank[w].mean() for rank in samples) for w in range(2)]
            found = record.samples["statistics"][name]
            for p in (20, 50, 80):
                assert found[f"p{p}"] == pytest.approx(np.percentile(per_window, p), rel=1e-5)
            assert getattr(record, f"{name}MS") == found["p50"]
        if case.mode == "inference":
            assert record.backwardMS is None


def test_gate_passed_on_every_quantity(local_run):
    for case in local_run.sweep.cases:
        checked = local_run.records[case.id].provenance["checked"]
        names = {"y"}
        if case.mode == "training":
            names |= {"dx", "dscores", "dw13", "dw2", "shared_w13", "shared_w2"}
        assert checked["errors"].keys() == names
        # not 0 either: BF16 was really computed
        assert all(1e-4 < error < 1e-2 for error in checked["errors"].values())
        assert checked["checked"] == "all"


def test_bytes_sent_are_those_of_the_routing(local_run):
    for case in local_run.sweep.cases:
        _, again = _packed(case) if case.pipeline == "standard" else ([], [0] * case.ep)
        ways = 2 if case.mode == "training" else 1
        recomputed = _recomputed_rows(case) if any(again) and case.mode == "training" else 0
        moved = sum(ways * (_rows(case, n) + _rows(case, n).T) for n in range(case.layers))
        moved = (moved + recomputed) * case.D * 2
        np.fill_diagonal(moved, 0)
        traffic = local_run.records[case.id].provenance["traffic"]
        assert traffic["sentScaleUp"] == moved.sum(axis=1).tolist()
        assert traffic["receivedScaleUp"] == moved.sum(axis=0).tolist()
        assert traffic["sentScaleOut"] == [0] * case.ep


def _recomputed_rows(case: Case) -> np.ndarray:
    """Rows fetched again in backward, from rank to rank."""
    plan = plan_ours(MoEConfig.from_case(case))
    held, fetched = [0] * case.ep, np.zeros((case.ep, case.ep), int)
    for layer in range(case.layers):
        rows = _rows(case, layer)
        for rank in range(case.ep):
            needed = plan.saved_bytes(int(rows[:, rank].sum()))
            if held[rank] + needed <= plan.slot_bytes:
                held[rank] += needed
            else:
                fetched[:, rank] += rows[:, rank]
    return fetched


def test_mean_bytes_sent_are_within_half_a_percent_of_the_wire_model(local_run):
    # the model counts no row twice, so cases that recompute are not its
    cases = [c for c in local_run.sweep.cases if c.slotFactor != 0.5]
    wire = cost_table(case_table(cases))["wireBytes"].tolist()
    assert len(cases) > 20
    for case, modelled in zip(cases, wire, strict=True):
        record = local_run.records[case.id]
        sent = np.mean(record.provenance["traffic"]["sentScaleUp"])
        assert sent == pytest.approx(modelled, rel=0.005)
        assert record.meanTXGBps == pytest.approx(sent / record.iterationMS / 1e6)


def test_capacity_is_what_happened_and_equals_the_plan(local_run):
    cases = [
        c for c in local_run.sweep.cases if c.category == "packing" and c.pipeline == "standard"
    ]
    assert {c.slotFactor for c in cases} == PACKING_SLOTS
    for case in cases:
        plan, (held, again) = plan_ours(MoEConfig.from_case(case)), _packed(case)
        found = local_run.records[case.id].capacity
        scratch = [r.nbytes for r in plan.regions.values() if r.part == "scratch"]
        assert found == {
            "slotBytes": plan.slot_bytes,
            "slotFactor": case.slotFactor,
            "scratchBytes": sum(scratch),
            "scratchFactor": 8.0,
            "hostScratchBytes": 0,
            "slots": 1,
            "savedRank0Bytes": held[0],
            "maxSavedRankBytes": max(held),
            "capacityRecomputeFlags": sum(again),
            "inspectedRankLayers": 20,
        }
        assert (sum(again) > 0) == (case.slotFactor == 0.5)
        bytes_ = local_run.records[case.id].provenance["plan"]
        assert bytes_["measuredArenaBytes"] == bytes_["arenaBytes"] == plan.arena_bytes


def test_records_say_how_they_came_about(local_run):
    for record in local_run.records.values():
        assert record.device.startswith("CPU ")
        assert (record.origin, record.implementation) == ("measured", "workbench")
        told = record.provenance
        assert told["protocol"]["windows"] == told["protocol"]["iterations"] == 2
        assert told["group"] == "shared"
        assert told["clock"] == "time.perf_counter"
        assert told["graphs"] is False
        assert told["flushedBytes"] == 0
        assert {"torch", "python", "moe-workbench"} <= told["versions"].keys()
        assert len(told["phasesMS"]) == record.ep
        assert any(name.startswith("forward") for name in told["phasesMS"][0])
        assert told["launches"][0] == "publish"
        assert record.peakAllocatedGiB > 0.1
        assert record.usefulTFPerGPU > 0


def test_export_has_the_four_keys_and_reads_back(local_run, tmp_path):
    table = load_table(local_run.sweep.folder.path)
    export_results(table, tmp_path / "own.json")
    document = json.loads((tmp_path / "own.json").read_text())
    assert document.keys() == {"meta", "cases", "pairs", "allPipelinePairs"}
    again = load_table(tmp_path / "own.json")
    assert again["id"].tolist() == table["id"].tolist()
    for name in ("factors", "iterationMS", "slotFactor", "device", "origin", "T", "capacity"):
        assert again[name].tolist() == table[name].tolist(), name


def test_the_report_shows_the_run(local_run):
    report = open_report(ReportParameters(results=str(local_run.sweep.folder.path)))
    assert len(report.table) == len(local_run.sweep.cases)
    shown = report.figures["imbalance"]
    times = {
        round(y, 9)
        for trace in shown.data
        for y in (trace.y if trace.y is not None else ())
        if isinstance(y, float)
    }
    single = [r.iterationMS for r in local_run.records.values() if r.category == "single_layer"]
    assert {round(t, 9) for t in single} <= times


def test_a_finished_sweep_is_not_measured_again(local_run):
    from workbench.bench.sweep import open_sweep, run_sweep

    before = {p: p.stat().st_mtime_ns for p in local_run.sweep.folder.records.iterdir()}
    again = open_sweep(local_run.sweep.folder.path, ranks=2, resume=True)
    assert run_sweep(again).done == len(before)
    after = {p: p.stat().st_mtime_ns for p in local_run.sweep.folder.records.iterdir()}
    assert after == before
