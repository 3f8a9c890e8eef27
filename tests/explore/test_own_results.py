"""A user's own records are a further origin in every explorer."""

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import InputError
from workbench.explore.explorer import Explorer
from workbench.explore.imbalance import ImbalanceExplorer, ImbalanceParameters
from workbench.explore.precision import PrecisionExplorer, PrecisionParameters
from workbench.explore.width import WidthExplorer, WidthParameters
from workbench.records.results import REFERENCE

SMALL = {"T": 64, "D": 128, "E": 8, "K": 2, "sharedExperts": 1}
STUDY = {"T": 2048, "D": 7168, "E": 384, "K": 6, "sharedExperts": 1}


def record(
    folder: Path,
    time: float,
    ep: int,
    F: int,
    shape: dict[str, int],
    suffix: str,
    device: str = "CPU",
    **more: Any,
) -> None:
    """A record of a run, made from one of the study's."""
    base = next(
        c
        for c in json.loads(REFERENCE.read_text())["cases"]
        if c["id"].startswith("mok-inference-ep8-bf16-native-single_layer-i1")
    )
    name = f"mok-inference-ep{ep}-bf16-native-single_layer-i1-F{F}{suffix}"
    own = (
        base
        | shape
        | {
            "id": name,
            "ep": ep,
            "F": F,
            "iterationMS": time,
            "forwardMS": time,
            "origin": "measured",
            "implementation": "ours",
            "device": device,
            "status": "ok",
        }
        | more
    )
    own.pop("capacity", None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.record.json").write_text(json.dumps(own))


def measured(explorer: Explorer) -> dict[str, list[float]]:
    """Panel -> y of the user's own points (x for the panel whose x is the time)."""
    found: dict[str, list[float]] = {}
    for t in explorer.view.spec["data"]:
        if t["name"].startswith("measured (own") and len(t["x"]):
            axis = "x" if t["meta"] == "Time against error" else "y"
            found.setdefault(t["meta"], []).extend(map(float, t[axis]))
    return found


def test_records_of_the_studys_workload_appear_beside_it(tmp_path: Path) -> None:
    record(tmp_path, 1.25, 16, 3072, STUDY, "")
    given: dict[str, Any] = {"results": str(tmp_path), "mode": "inference", "ep": 16}
    load = ImbalanceExplorer(ImbalanceParameters(factor=1.0, system="mok native bf16", **given))
    shown = measured(load)
    assert shown["Predicted time over imbalance"] == [1.25]
    assert shown["dist_moe against mok"] == [1.25]
    table = load.table()
    elsewhere = "measured (own, other device)"
    own = table[table["origin"] == elsewhere]
    assert own["iterationMS"].tolist() == [1.25]
    assert {"predicted", "published", elsewhere} == set(table["origin"])
    assert "measured on CPU, while the prediction is for GB300" in load.sentence()
    symbols = {
        t["name"]: t["marker"]["symbol"]
        for t in load.view.spec["data"]
        if t["name"] in ("published", elsewhere)
    }
    assert symbols["published"] != symbols[elsewhere]
    width = WidthExplorer(WidthParameters(system="mok native bf16", **given))
    assert measured(width)["dist_moe against mok"] == [1.25]
    assert len(measured(width)["Useful rate over F"]) == 1
    precision = PrecisionExplorer(PrecisionParameters(formats=["bf16"], **given))
    assert measured(precision) == {"Time against error": [1.25]}


def test_a_run_of_another_workload_moves_the_controls_to_it(tmp_path: Path) -> None:
    record(tmp_path, 3.5, 4, 64, SMALL, "-T64-D128-E8-K2")
    for explorer in (ImbalanceExplorer(), WidthExplorer(), PrecisionExplorer()):
        explorer.widget()
        explorer.controls["results"].value = str(tmp_path)
        assert explorer.problem == ""
        state = explorer.state
        assert (state.mode, state.ep, state.F, state.T, state.D, state.E, state.K) == (
            "inference",
            4,
            64,
            64,
            128,
            8,
            2,
        )
        assert (
            "the workload is now inference EP 4, T=64 D=128 E=8 K=2 F=64" in explorer.file_message
        )
        if not isinstance(explorer, PrecisionExplorer):
            assert 3.5 in measured(explorer)["dist_moe against mok"]
        explorer.controls["results"].value = ""
        assert measured(explorer) == {}


def test_the_device_follows_the_records(tmp_path: Path) -> None:
    record(tmp_path, 1.25, 16, 3072, STUDY, "", "NVIDIA H200")
    for explorer in (ImbalanceExplorer(), WidthExplorer(), PrecisionExplorer()):
        explorer.widget()
        explorer.controls["results"].value = str(tmp_path)
        assert explorer.state.hardware == "H200"
        assert "the device is now H200, as theirs" in explorer.file_message
        assert "while the prediction is for" not in explorer.sentence()
        assert "measured (own)" in {t["name"] for t in explorer.view.spec["data"] if len(t["x"])}
        explorer.controls["hardware"].value = "GB300"
        assert explorer.file_message == ""
        told = "measured on NVIDIA H200, while the prediction is for GB300"
        assert told in explorer.sentence()


def test_headless_says_what_the_run_has_instead(tmp_path: Path) -> None:
    record(tmp_path / "run", 3.5, 4, 64, SMALL, "-T64-D128-E8-K2")
    explorer = ImbalanceExplorer(ImbalanceParameters(results=str(tmp_path / "run")))
    told = "0 of 1 records of run have this workload; the file has inference EP 4, T=64 D=128"
    assert told in explorer.sentence()
    assert measured(explorer) == {}
    shape: Any = {"T": 64, "D": 128, "E": 8, "K": 2, "F": 64}
    right = ImbalanceParameters(
        results=str(tmp_path / "run"), mode="inference", ep=4, factor=1.0, shape=shape
    )
    assert measured(ImbalanceExplorer(right))["dist_moe against mok"] == [3.5]


def test_bad_results_are_a_message(tmp_path: Path) -> None:
    explorer = WidthExplorer()
    explorer.widget()
    before = explorer.view
    explorer.controls["results"].value = str(tmp_path)
    assert "holds no *.record.json" in explorer.file_message
    (tmp_path / "x.record.json").write_text("{")
    explorer.controls["results"].value = str(tmp_path / "x.record.json")
    assert "not JSON" in explorer.file_message
    assert explorer.view is before
    with pytest.raises(InputError, match="not JSON"):
        WidthExplorer(WidthParameters(results=str(tmp_path / "x.record.json")))


def test_own_points_have_their_spread_and_their_protocol(tmp_path: Path) -> None:
    more = {
        "usefulTFPerGPU": 100.0,
        "noisy": True,
        "samples": {"statistics": {"iteration": {"p20": 1.0, "p50": 1.25, "p80": 2.0}}},
        "provenance": {"protocol": {"warmups": 2, "windows": 5, "iterations": 4}},
    }
    record(tmp_path, 1.25, 16, 3072, STUDY, "", **more)
    given: dict[str, Any] = {"results": str(tmp_path), "mode": "inference", "ep": 16}
    explorers: list[Explorer] = [
        ImbalanceExplorer(ImbalanceParameters(factor=1.0, system="mok native bf16", **given)),
        WidthExplorer(WidthParameters(system="mok native bf16", **given)),
        PrecisionExplorer(PrecisionParameters(**given)),
    ]
    bars: dict[str, set[tuple[float, float]]] = {}
    for explorer in explorers:
        for t in explorer.view.spec["data"]:
            for axis in "xy":
                if t["name"].startswith("measured (own") and f"error_{axis}" in t:
                    bar = t[f"error_{axis}"]
                    value = float(t[axis][0])
                    ends = value - float(bar["arrayminus"][0]), value + float(bar["array"][0])
                    bars.setdefault(f"{t['meta']} {axis}", set()).add(ends)
            if t["name"] == "published":
                assert not {"error_x", "error_y"} & t.keys()  # it has no samples
        told = " ".join([explorer.sentence(), *explorer.view.notes])
        assert "measured by 2 warm-ups, 5 windows of 4 iterations" in told
        assert "1 noisy: slowest window above 1.25 x the median one" in told
    time, rate = {(1.0, 2.0)}, {(62.5, 125.0)}
    assert {
        name: {tuple(round(v, 9) for v in ends) for ends in found} for name, found in bars.items()
    } == {
        "Predicted time over imbalance y": time,
        "dist_moe against mok y": time,
        "Roofline y": rate,
        "Useful rate over F y": rate,
        "Time against error x": time,
    }
    for explorer in explorers[:2]:
        table = explorer.table()
        own = table[table["origin"].str.startswith("measured")]
        assert own[["iterationMS_p20", "iterationMS_p80"]].to_numpy().tolist() == [[1.0, 2.0]]
        assert own["noisy"].tolist() == [True]
