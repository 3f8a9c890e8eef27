"""The width explorer: random states against model, cost and counted tiles."""

import math

import numpy as np
import pytest

from tests.explore.test_imbalance import (
    CALIBRATION,
    STATES,
    SYSTEMS,
    check_refused,
    device,
    drawn,
    values,
    walk,
)
from workbench.case import Case, case_table
from workbench.explore.explorer import Explorer
from workbench.explore.width import WidthExplorer, WidthParameters
from workbench.explore.width_panels import WidthState, changes, quantisation
from workbench.model.cost import cost_table
from workbench.model.roofline import roofline_table


def cases_of(state: WidthState, F: int) -> list[Case]:
    shape = {n: getattr(state, n) for n in ("mode", "ep", "T", "D", "E", "K", "sharedExperts")}
    return [Case(backend=b, pipeline=p, precision=c, F=F, **shape) for b, p, c in SYSTEMS]


def counted(state: WidthState, F: int, sms: int | None) -> tuple[float, float | None]:
    """(tile, wave) shares, tile by tile."""
    height = 256 if state.backend == "mok" else 128
    E_local, rows = state.E // state.ep, state.T * state.K
    per_expert = [rows // E_local + (e < rows % E_local) for e in range(E_local)]
    useful = whole = waves = 0.0
    for columns, depth in ((2 * F, state.D), (state.D, F)):
        tiles = sum(math.ceil(r / height) * math.ceil(columns / state.tile) for r in per_expert)
        useful += rows * columns * depth
        whole += tiles * height * state.tile * depth
        if sms:
            waves += math.ceil(tiles / sms) * sms * height * state.tile * depth
    return useful / whole, whole / waves if sms else None


def check(explorer: Explorer) -> None:
    state, spec = explorer.state, explorer.view.spec
    mine = SYSTEMS.index(state.system)
    hardware = device(state.hardware)
    F = [int(f) for f in drawn(spec, "Weight memory over F", "BF16 weights")["x"]]
    at = 9
    there = cases_of(state, F[at])[mine]
    found = CALIBRATION.predict([*cases_of(state, state.F), there], hardware)
    shown = values(spec, "dist_moe against mok", "predicted")
    np.testing.assert_array_equal(shown, found["iterationMS"].to_numpy()[:-1])
    row = found.iloc[mine]
    name = " ".join([state.backend, state.pipeline, state.precision.upper()])
    swept = found.iloc[-1]
    assert drawn(spec, "Useful rate over F", name)["y"][at] == pytest.approx(
        swept.usefulTFPerGPU, nan_ok=True
    )
    if row.runs == "yes":
        assert values(spec, "Useful rate over F", "this case") == [row.usefulTFPerGPU]
    check_refused(explorer, row, found.iloc[: len(SYSTEMS)])
    known = np.flatnonzero(np.isfinite(drawn(spec, "Useful rate over F", name)["y"])).tolist()
    assert (at in known) == (swept.runs == "yes")
    if at in known:
        place = known.index(at)
        band = drawn(spec, "Useful rate over F", "90 % interval")["y"]
        useful = cost_table(case_table([there]))["usefulFLOP"].iloc[0] / 1e9
        assert band[place] == pytest.approx(useful / swept.iterationHighMS, rel=1e-9)
        assert band[-1 - place] == pytest.approx(useful / swept.iterationLowMS, rel=1e-9)

        floors = roofline_table(case_table([there]), hardware).iloc[0]
        for floor, column in (("compute", "Compute"), ("HBM", "Hbm"), ("link", "Link")):
            shown = drawn(spec, "Floors of the busiest rank over F", f"{floor} floor")["y"][place]
            assert shown == pytest.approx(floors[f"busiest{column}FloorMS"], rel=1e-9)
    cost = cost_table(case_table([cases_of(state, state.F)[mine]])).iloc[0]
    intensity = cost["usefulFLOP"] / cost["modeledHBMBytes"]
    if row.runs == "yes":
        assert values(spec, "Roofline", "this case", "x") == pytest.approx([intensity])

    tile, wave = counted(state, F[at], hardware.sm_count)
    shown = drawn(spec, "Tiles and waves over F", "whole tiles")["y"][at]
    assert shown == pytest.approx(100 * tile, rel=1e-12)
    assert wave is not None
    both = drawn(spec, "Tiles and waves over F", "tiles and waves")["y"][at]
    assert both == pytest.approx(100 * tile * wave, rel=1e-12)

    expert = 3 * state.D * F[at]
    routed, shared = state.E // state.ep * expert, state.sharedExperts * expert
    for label, size in (("BF16 weights", 2), ("MXFP8 weights", 33 / 32)):
        shown = drawn(spec, "Weight memory over F", label)["y"][at] * 2**30
        assert shown == pytest.approx(routed * size + shared * 2, rel=1e-12)


def test_random_states() -> None:
    explorer = WidthExplorer()
    possible, touched = walk(explorer, STATES, seed=3, look=check)
    assert possible > 0.9 * STATES
    assert touched == set(explorer.controls) - {"results"}


def test_published_widths_lie_on_the_figure() -> None:
    explorer = WidthExplorer(WidthParameters(system="dist_moe standard bf16"))
    shown = [
        t
        for t in explorer.view.spec["data"]
        if t["meta"] == "Useful rate over F" and t["name"] == "published" and len(t["x"])
    ]
    points = {(int(x), round(y, 3)) for t in shown for x, y in zip(t["x"], t["y"], strict=True)}
    assert {x for x, _ in points} == {1536, 3072, 6144}
    table = explorer.table()
    ours = table[(table["origin"] == "published") & (table["system"] == "dist_moe standard BF16")]
    assert {round(v, 3) for v in ours["usefulTFPerGPU"]} <= {y for _, y in points}


def test_no_waves_without_a_source_for_the_sm_count() -> None:
    state = WidthState()
    assert quantisation(state, [3072], None).wave is None
    explorer = WidthExplorer()
    explorer.sources.hardware("GB300")
    bare = explorer.sources._devices["GB300"].__class__(
        **{**vars(explorer.sources.hardware("GB300")), "sm_count": None}
    )
    explorer.sources._devices["GB300"] = bare
    explorer.refresh()
    spec = explorer.view.spec
    told = [
        t for t in spec["data"] if t["meta"] == "Tiles and waves over F" and t["name"] == "note"
    ]
    assert told[0]["text"] == ["no SM count known for GB300"]
    names = {
        t["name"] for t in spec["data"] if t["meta"] == "Tiles and waves over F" and len(t["x"])
    }
    assert names == {"whole tiles", "note"}
    assert "SMs" not in explorer.sentence()


def test_where_the_binding_floor_changes() -> None:
    assert changes([1, 2, 4], ["link", "link", "compute"]) == [(3.0, "link", "compute")]
    assert changes([1, 2], ["HBM", "HBM"]) == []
    explorer = WidthExplorer()
    spec = explorer.view.spec
    x = [
        f
        for f in drawn(spec, "Floors of the busiest rank over F", "binding floor changes")["x"]
        if f is not None
    ]
    below, above = (
        roofline_table(case_table([cases_of(explorer.state, int(f))[2]]), device("GB300"))
        for f in (x[0] - 300, x[0] + 300)
    )
    assert (below["busiestBinds"][0], above["busiestBinds"][0]) == ("link", "compute")
    assert "the binding floor changes from link to compute" in explorer.sentence()


def test_zoom_lives_through_a_change() -> None:
    explorer = WidthExplorer()
    explorer.widget()
    live = explorer.live
    assert live is not None
    live.layout.xaxis2.range = [1000, 2000]
    live.data[5].selectedpoints = [0]
    before = tuple(map(id, live.data))
    explorer.controls["F"].value = 4096
    explorer.controls["precision"].value  # noqa: B018
    assert live.layout.xaxis2.range == (1000, 2000)
    assert live.data[5].selectedpoints == (0,)
    assert tuple(map(id, live.data)) == before
    assert np.isclose(live.layout.height, explorer.view.spec["layout"]["height"])
