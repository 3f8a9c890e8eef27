"""The imbalance explorer: random states against model, plan and routing called directly."""

import os
from datetime import UTC, datetime
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from workbench.case import PROFILES, Case, case_table
from workbench.errors import InputError
from workbench.explore.explorer import Explorer
from workbench.explore.imbalance import ImbalanceExplorer, ImbalanceParameters
from workbench.explore.loads import ImbalanceState
from workbench.explore.trace import Trace
from workbench.hardware import load_hardware
from workbench.model.calibration import load_calibration
from workbench.model.roofline import roofline_table
from workbench.planning.case_plan import CasePlans, plan_case
from workbench.records.results import load_table
from workbench.report.theme import STYLES
from workbench.routing import rows_by_expert, rows_by_rank

STATES = int(os.environ.get("WORKBENCH_RANDOM_STATES", "200"))
"""Random states that each explorer is put into; 500 and more by hand."""
SYSTEMS = [system for system in STYLES if system[0] != "baseline"]
CALIBRATION = load_calibration()
PUBLISHED = load_table()


@cache
def device(name: str) -> Any:
    return load_hardware(name)


def drawn(spec: Any, panel: str, name: str) -> dict[str, Any]:
    """The only trace of that name in a panel that shows anything."""
    found = [t for t in spec["data"] if t["meta"] == panel and t["name"] == name and len(t["x"])]
    assert len(found) == 1, (panel, name, len(found))
    return dict(found[0])


def values(spec: Any, panel: str, name: str, axis: str = "y") -> list[float]:
    return [float(v) for v in drawn(spec, panel, name)[axis]]


def cases_of(state: ImbalanceState, factors: tuple[float, ...]) -> list[Case]:
    """The state's case on each system, built here anew."""
    shape = {n: getattr(state, n) for n in ("mode", "ep", "F", "T", "D", "E", "K", "sharedExperts")}
    load: dict[str, Any]
    if len(factors) == 1:
        load = {"imbalance": factors[0], "slotFactor": state.scratchFactor}
    else:
        profile = state.load if state.load in PROFILES else "own"
        load = {
            "category": "packing",
            "profile": profile,
            "factors": factors,
            "slotFactor": state.slotFactor,
        }
    return [
        Case(backend=b, pipeline=p, precision=c, scratchFactor=state.scratchFactor, **shape, **load)
        for b, p, c in SYSTEMS
    ]


def check(explorer: ImbalanceExplorer) -> None:
    """Every number that the current figure shows, against direct calls."""
    state, spec = explorer.state, explorer.view.spec
    if state.load == "trace":
        assert explorer.trace is not None
        counts = np.array(explorer.trace.counts)
        share = counts.reshape(len(counts), state.ep, -1).sum(axis=2) / counts.sum(axis=1)[:, None]
        if explorer.sentence().startswith("No time: "):
            assert explorer.table()["runs"][SYSTEMS.index(state.system)] != "yes"
            return
        shown = [float(v) for v in drawn(spec, "Predicted time over imbalance", "this load")["x"]]
        slack = state.E / (state.T * state.K)  # rows are whole numbers
        assert shown == pytest.approx([(share.max(axis=1) * state.ep).max()], abs=slack)
        return
    factors = {"factor": (state.factor,), "table": tuple(state.factors)}.get(
        state.load, PROFILES.get(state.load, ())
    )
    cases = cases_of(state, factors)
    mine = SYSTEMS.index(state.system)
    x = sweep_point(spec, state)
    base = np.array(factors)
    scaled = (
        base * 0 + x
        if base.max() == 1 or len(factors) == 1
        else np.maximum(1 + (x - 1) / (base.max() - 1) * (base - 1), 0)
    )
    swept = cases_of(state, tuple(scaled.tolist()))[mine]
    found = CALIBRATION.predict([*cases, swept], device(state.hardware))
    for panel, name in (
        ("dist_moe against mok", "iterationMS"),
        ("Peak memory", "peakAllocatedGiB"),
    ):
        shown = values(spec, panel, "predicted")
        np.testing.assert_array_equal(shown, found[name].to_numpy()[:-1])
    row = found.iloc[mine]
    curve = drawn(
        spec,
        "Predicted time over imbalance",
        " ".join([state.backend, state.pipeline, state.precision.upper()]),
    )
    assert curve["y"][12] == pytest.approx(found["iterationMS"].iloc[-1], rel=1e-12, nan_ok=True)
    check_band(spec, curve, 12, found.iloc[-1])

    floors = roofline_table(case_table([cases[mine]]), device(state.hardware)).iloc[0]
    names = [f"busiest{n}FloorMS" for n in ("Compute", "Hbm", "Link")]
    expected = [*floors[names].tolist(), row["busiestFixedFloorMS"], row["iterationMS"]]
    if row["runs"] == "yes":
        shown = values(spec, "Floors of the busiest rank", "floor")
        assert shown == pytest.approx(expected, rel=1e-9)
    check_refused(explorer, row, found.iloc[: len(SYSTEMS)])

    plans = CasePlans(table=case_table([cases[mine]]))
    padded = plans.padded(plans.rows.rank0)[0]
    again = padded * plans.saved[2][0] if state.backend == "dist_moe" else plans.replay_rows[0]
    once = values(spec, "Busiest rank by layer", "done once")
    assert once == (padded - again).tolist()
    if again.any():
        word = "recomputed" if state.backend == "dist_moe" else "replayed"
        shown = drawn(spec, "Busiest rank by layer", word)
        assert list(map(int, shown["x"])) == [n + 1 for n in np.flatnonzero(again)]
        assert [int(v) for v in shown["y"]] == [int(v) for v in again if v]

    bars = [t for t in spec["data"] if t["meta"] == "Load per rank" and t["type"] == "bar"]
    each = [rows_by_rank(T=state.T, K=state.K, ep=state.ep, factor=f) for f in factors]
    busiest = int(np.argmax([rows.max() for rows in each]))
    rows = each[state.layer - 1 if 1 <= state.layer <= len(factors) else busiest]
    assert np.array_equal(bars[0]["y"], rows)
    check_bounds(spec, state, cases)
    check_published(spec, state, factors)


def sweep_point(spec: Any, state: ImbalanceState) -> float:
    curve = drawn(
        spec,
        "Predicted time over imbalance",
        " ".join([state.backend, state.pipeline, state.precision.upper()]),
    )
    return float(curve["x"][12])


def check_band(spec: Any, curve: Any, at: int, expected: Any) -> None:
    """The band has the points of the curve that have a time, forth and back."""
    known = np.flatnonzero(np.isfinite(curve["y"]))
    band = [t for t in spec["data"] if t["meta"] == curve["meta"] and t["name"] == "90 % interval"]
    assert [float(x) for x in band[0]["x"]] == [
        float(curve["x"][n]) for n in [*known, *known[::-1]]
    ]
    assert (at in known) == (expected["runs"] == "yes")
    if at in known:
        place = known.tolist().index(at)
        limits = band[0]["y"][place], band[0]["y"][-1 - place]
        wanted = expected[["iterationLowMS", "iterationHighMS"]].tolist()
        assert limits == pytest.approx(wanted, rel=1e-12)


def check_refused(explorer: Explorer, row: Any, systems: Any) -> None:
    """What cannot run has its reason and no time, in sentence, table and bars."""
    first = explorer.sentence().splitlines()[0]
    if row["runs"] == "yes":
        assert "cannot run" not in first
        assert "stops" not in first
    else:
        assert first.startswith("No time: ")
        assert f" cannot run: {row['runs'].split(' (')[0]}" in first
        assert " ms" not in first
    table = explorer.table().iloc[: len(systems)]
    assert table["runs"].tolist() == systems["runs"].tolist()
    lost = table[table["runs"] != "yes"]
    assert lost[["iterationMS", "iterationLowMS", "iterationHighMS"]].isna().all(axis=None)
    words = [
        t
        for t in explorer.view.spec["data"]
        if t["meta"] == "dist_moe against mok" and t["name"] == "does not run"
    ]
    assert words[0]["text"] == [why.split(":")[0] for why in lost["runs"]]


def check_bounds(spec: Any, state: ImbalanceState, cases: list[Case]) -> None:
    """The lines over the ranks are the two plans'."""
    dist = next(
        c
        for s, c in zip(SYSTEMS, cases, strict=True)
        if s == state.system
        or (state.backend == "mok" and s[0] == "dist_moe" and s[2] == state.precision)
    )
    plan: Any = plan_case(dist).reference if dist.backend == "dist_moe" else None
    scratch = values(spec, "Load per rank", "dist_moe scratch (hard)")
    assert scratch == [plan.device_scratch_capacity_rows] * 2
    names = {t["name"] for t in spec["data"] if t["meta"] == "Load per rank" and len(t["x"])}
    if state.mode == "inference":
        assert not names & {"mok retained", "dist_moe slot (soft)"}
        return
    mok = next(c for c in cases if c.backend == "mok" and c.precision == state.precision)
    retained: Any = plan_case(mok).reference
    assert values(spec, "Load per rank", "mok retained") == [retained.retained_rows_per_layer] * 2
    shown = values(spec, "Load per rank", "dist_moe slot (soft)")[0]
    # bytes per row and per layer as the study has them, which do not know buffers' alignment
    D, F = state.D, state.F
    each = 2 * D + 4 * F if state.precision == "bf16" else 4 * F + (D + F) * 33 / 32
    full = shown * each + state.T * state.K * 2 * D
    expected = plan.activation_slot_bytes / dist.layers
    if shown:
        assert full == pytest.approx(expected, rel=1e-3, abs=2000)
    else:
        assert expected <= state.T * state.K * 2 * D + 2000


def check_published(spec: Any, state: ImbalanceState, factors: tuple[float, ...]) -> None:
    shown = {
        (name, float(y))
        for t in spec["data"]
        if t["meta"] == "Predicted time over imbalance" and t["name"] == "published"
        for name, y in zip(t["customdata"] or [], t["y"], strict=True)
    }
    if state.hardware != "GB300":
        assert not shown
        return
    table = PUBLISHED
    for name in ("mode", "ep", "F", "T", "D", "E", "K", "sharedExperts"):
        table = table[table[name] == getattr(state, name)]
    table = table[table["layers"] == len(factors)]
    if len(factors) > 1:
        table = table[np.array([f == factors for f in table["factors"]], bool)]
    others = (table["precision"] == state.precision) & (table["backend"] != state.backend)
    own = (table["backend"] == state.backend) & (table["pipeline"] == state.pipeline)
    table = table[others | (own & (table["precision"] == state.precision))]
    assert shown == set(zip(table["id"], table["iterationMS"], strict=True))


def live_equals(explorer: Explorer) -> None:
    """What was updated in place is what a new figure would show."""
    fresh = go.Figure(explorer.view.spec)
    live = explorer.live
    assert live is not None
    assert len(live.data) == len(fresh.data)
    for mine, other in zip(live.data, fresh.data, strict=True):
        assert mine.name == other.name
        for axis in "xy":
            a, b = getattr(mine, axis), getattr(other, axis)
            np.testing.assert_array_equal(a if a is not None else [], b if b is not None else [])
        assert mine.showlegend == other.showlegend
    assert live.layout.title.text == fresh.layout.title.text
    assert live.layout.height == fresh.layout.height


def walk(explorer: Explorer, steps: int, seed: int, look: Any) -> tuple[int, set[str]]:
    """Random changes of controls; returns how many states were possible, and what was changed."""
    explorer.widget()
    rng = np.random.default_rng(seed)
    possible, touched, restored = 0, set(), 0
    for n in range(steps):
        touched.add(explorer.step(rng))
        if not explorer.problem:
            possible += 1
            look(explorer)
        elif restored < n - 5:  # do not stay where nothing is possible
            restored = n
            explorer.set(E=384, D=7168, F=3072, K=6)
        if n % 50 == 0 and not explorer.problem:
            live_equals(explorer)
    return possible, touched


def uploaded(explorer: Explorer, name: str, content: bytes) -> None:
    """Give the upload control a file, as the browser does."""
    file = {
        "name": name,
        "content": content,
        "size": len(content),
        "type": "",
        "last_modified": datetime.now(UTC),
    }
    explorer.upload.set_trait("value", (file,))


def trace_of(layers: int, experts: int) -> Trace:
    counts = np.random.default_rng(5).integers(0, 900, (layers, experts))
    return Trace(name="counts.csv", counts=tuple(map(tuple, counts.tolist())))


def test_random_states() -> None:
    explorer = ImbalanceExplorer()
    explorer.trace = trace_of(7, 384)
    possible, touched = walk(explorer, STATES, seed=11, look=check)
    assert possible > 0.6 * STATES
    assert touched == set(explorer.controls) - {"results"}


@pytest.mark.parametrize("profile", ["A", "B"])
@pytest.mark.parametrize("system", [" ".join(system) for system in SYSTEMS])
def test_published_packing_cases_lie_on_the_figure(profile: str, system: str) -> None:
    explorer = ImbalanceExplorer(ImbalanceParameters(load=profile, system=system))  # type: ignore[arg-type]
    check(explorer)
    table = explorer.table()
    backend, pipeline, precision = system.split()
    case = PUBLISHED[
        (PUBLISHED.profile == profile)
        & (PUBLISHED.ep == 32)
        & (PUBLISHED.backend == backend)
        & (PUBLISHED.pipeline == pipeline)
        & (PUBLISHED.precision == precision)
    ].iloc[0]
    shown = table[table["id"] == case["id"]]
    assert shown["iterationMS"].tolist()[-1] == case["iterationMS"]
    assert set(shown["origin"]) <= {"predicted", "published"}


def test_mok_replays_what_the_study_recorded() -> None:
    explorer = ImbalanceExplorer(ImbalanceParameters(load="A", system="mok native bf16"))
    assert "81,920 rows of layers 1, 3 are replayed by mok" in explorer.sentence()
    spec = explorer.view.spec
    assert values(spec, "Busiest rank by layer", "replayed") == [59392, 22528]
    assert values(spec, "Load per rank", "mok retained") == [32768, 32768]


def test_a_small_slot_recomputes_and_a_small_scratch_stops() -> None:
    recompute = ImbalanceExplorer(
        ImbalanceParameters(load="A", system="dist_moe standard bf16", slotFactor=0.5)
    )
    assert "are recomputed by dist_moe" in recompute.sentence()
    stop = ImbalanceExplorer(
        ImbalanceParameters(load="A", system="dist_moe standard bf16", scratchFactor=7)
    )
    assert "No time: dist_moe standard BF16 cannot run: scratch: " in stop.sentence()
    assert " ms" not in stop.sentence()
    other = ImbalanceExplorer(
        ImbalanceParameters(load="A", system="mok native bf16", scratchFactor=7)
    )
    first, second = other.sentence().splitlines()
    assert " ms predicted" in first
    assert "dist_moe" not in first
    assert "dist_moe standard BF16, dist_moe staged MXFP8" in second
    assert "cannot run: scratch: " in second


def test_replacement_gain_is_the_models_at_the_new_load() -> None:
    counts = rows_by_expert(T=2048, K=6, E=384, ep=32, factor=8.0)
    explorer = ImbalanceExplorer()
    uploaded(explorer, "counts.csv", ",".join(map(str, counts.tolist())).encode())
    assert explorer.state.load == "trace"
    row = explorer.table().iloc[SYSTEMS.index(("dist_moe", "mega", "mxfp8"))]
    # 98,304 rows on 12 experts: 8,192 each; the other 372 have 294,912 rows, 792 or 793 each.
    # One hot expert to a rank, and eleven of the others, of 12 * 792 = 9,504 rows: the most is
    # 8,192 + 11 * 793 at the worst
    factor = (
        max(placed for placed in values(explorer.view.spec, "Load per rank", "experts re-placed"))
        / 12288
    )
    assert 8192 + 11 * 792 <= factor * 12288 <= 8192 + 11 * 793
    case = Case(
        backend="dist_moe",
        mode="training",
        ep=32,
        precision="mxfp8",
        pipeline="mega",
        imbalance=factor,
    )
    again = CALIBRATION.predict([case])["iterationMS"].iloc[0]
    assert row["replacedMS"] == pytest.approx(again, rel=1e-12)
    assert row["replacementGain"] == pytest.approx(1 - again / row["iterationMS"])


def test_impossible_is_prevented_or_explained() -> None:
    explorer = ImbalanceExplorer()
    explorer.widget()
    c = explorer.controls
    c["ep"].value = 4
    assert c["factor"].max == 4
    assert "A" not in [value for _, value in c["load"].options], "7.5 is beyond 4 x 6 / 6"
    c["load"].value = "table"
    c["factors"].value = (1.0, 5.0)
    rule = "must lie between 0 and 4, ep*min(K, E/ep)/K at ep=4, E=384, K=6"
    assert explorer.problem == f"layer 2: imbalance=5.0 {rule}"
    assert rule in explorer.message
    with pytest.raises(InputError, match="layer 2"):
        explorer.figure()
    c["factors"].value = (1.0, 3.5)
    assert explorer.problem == explorer.message == ""
    c["ep"].value = 1
    assert explorer.problem == "layer 2: imbalance=3.5 must be 1 at ep=1"
    c["load"].value = "factor"
    assert (c["factor"].value, c["factor"].disabled, explorer.problem) == (1, True, "")
    c["backend"].value = "mok"
    assert [v for _, v in c["precision"].options] == ["bf16", "mxfp8"]
    c["E"].value = 10
    assert list(c["ep"].options) == [1, 2, 5, 10]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"system": "dist_moe mega bf16"}, "system='dist_moe mega bf16' must be one of: "),
        ({"system": "baseline alltoall bf16"}, "has no record in the calibration"),
        ({"ep": 5}, "E=384 must be divisible by ep=5"),
        ({"factor": 33.0}, "imbalance=33.0 must lie between 0 and 32"),
        ({"load": "trace"}, "trace= must name a .csv or .npz file"),
        ({"load": "table", "factors": []}, "factors=[] must hold a factor for at least one layer"),
        ({"hardware": "TPU"}, "hardware='TPU' must be one of GB300"),
        ({"shape": {"D": 100}}, "hidden_dim=100 must be divisible by 64"),
        ({"results": "no/such/folder"}, "no/such/folder: cannot be read"),
        ({"scratchFactor": 0.0}, "scratchFactor=0 must lie between 0.1 and 64"),
        ({"mode": "idle"}, "mode='idle' must be one of inference, training"),
    ],
)
def test_impossible_parameters_are_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        ImbalanceExplorer(ImbalanceParameters.model_validate(given))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_export_writes_figure_data_and_table(tmp_path: Any) -> None:
    explorer = ImbalanceExplorer(ImbalanceParameters(load="B", ep=64))
    exported = explorer.export(tmp_path, ("html",))
    assert not exported.skipped
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"imbalance.html", "imbalance.csv", "imbalance-table.csv"}
    table = pd.read_csv(tmp_path / "imbalance-table.csv")
    assert table["iterationMS"].tolist() == explorer.table()["iterationMS"].tolist()
    shown = pd.read_csv(tmp_path / "imbalance.csv")
    bars = shown[(shown.panel == "dist_moe against mok") & (shown.series == "predicted")]
    assert bars["y"].astype(float).tolist() == pytest.approx(table["iterationMS"][:5].tolist())
