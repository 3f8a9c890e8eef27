"""What the controls admit, refuse and give back, without a browser."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.explore.test_imbalance import trace_of, uploaded
from workbench.errors import InputError
from workbench.explore.explorer import Explorer
from workbench.explore.imbalance import ImbalanceExplorer, ImbalanceParameters
from workbench.explore.precision import PrecisionExplorer
from workbench.explore.width import WidthExplorer, WidthParameters


def csv_of(layers: int, experts: int) -> bytes:
    return "\n".join(",".join(map(str, row)) for row in trace_of(layers, experts).counts).encode()


@pytest.mark.parametrize("kind", [ImbalanceExplorer, WidthExplorer, PrecisionExplorer])
@pytest.mark.parametrize(
    ("name", "typed", "rule"),
    [
        ("F", 1e7, "F=10000000 must lie between 32 and 16384"),
        ("D", 7, "D=7 must lie between 64 and 16384"),
        ("K", 300, "K=300 must lie between 1 and 64"),
        ("E", 100000, "E=100000 must lie between 1 and 4096"),
        ("E", 0, "E=0 must lie between 1 and 4096"),
        ("E", 4, "K=6 must be at most E=4"),
        ("T", 2.5, "T=2.5 must be a whole number"),
        ("T", float("nan"), "T=nan must be a whole number"),
    ],
)
def test_values_out_of_range_are_refused(
    kind: type[Explorer], name: str, typed: float, rule: str
) -> None:
    explorer = kind()
    explorer.widget()
    before = explorer.controls[name].value
    explorer.controls[name].value = typed
    assert rule in explorer.problem
    assert rule in explorer.message
    assert explorer.controls[name].value == typed or typed != typed
    with pytest.raises(InputError, match=rule.split(" ")[0]):
        explorer.table()
    explorer.controls[name].value = before
    assert explorer.problem == explorer.message == ""


def test_a_table_refuses_layers_out_of_range() -> None:
    explorer = ImbalanceExplorer(ImbalanceParameters(load="table"))
    explorer.widget()
    count = explorer.controls["factors"].children[0]
    count.value = 65
    assert explorer.problem == "layers=65 must lie between 1 and 64"
    count.value = 4
    assert (explorer.problem, len(explorer.state.factors)) == ("", 4)
    explorer.controls["factors"].children[1].children[0].value = -1
    assert "layer 1: imbalance=-1" in explorer.problem
    with pytest.raises(InputError, match="layers=100 must lie between 1 and 64"):
        ImbalanceExplorer(ImbalanceParameters(load="table", factors=[1.0] * 100))


def test_ep_returns_when_it_divides_again() -> None:
    for explorer in (ImbalanceExplorer(), WidthExplorer(), PrecisionExplorer()):
        c = explorer.controls
        c["ep"].value = 32
        c["E"].value = 255
        assert c["ep"].value == 51  # log(51/32) < log(32/17)
        assert "EP is 51 in place of 32" in explorer.sentence()
        c["E"].value = 256
        assert c["ep"].value == 32
        assert "in place of" not in explorer.sentence()


def test_what_another_control_took_away_returns() -> None:
    explorer = ImbalanceExplorer(ImbalanceParameters(factor=8.0))
    c = explorer.controls
    c["ep"].value = 4
    assert c["factor"].value == 4
    assert "factor is 4.0 in place of 8.0" in explorer.sentence()
    c["ep"].value = 1
    assert c["factor"].value == 1
    c["ep"].value = 32
    assert c["factor"].value == 8
    c["backend"].value = "mok"
    assert "pipeline is native in place of mega" in explorer.sentence()
    c["backend"].value = "dist_moe"
    assert (c["pipeline"].value, c["precision"].value) == ("mega", "mxfp8")
    assert "in place of" not in explorer.sentence()


def test_a_file_that_was_refused_is_forgotten_at_the_next_change() -> None:
    explorer = ImbalanceExplorer()
    explorer.widget()
    uploaded(explorer, "counts.csv", csv_of(3, 384))
    assert explorer.file_message == "counts.csv: 3 layers x 384 experts"
    uploaded(explorer, "bad.csv", b"1,2\n-3,4\n")
    assert "bad.csv: layer 1, expert 0: count=-3" in explorer.file_message
    explorer.controls["load"].value = "factor"
    assert explorer.file_message == ""
    explorer.controls["load"].value = "trace"
    assert explorer.file_message == "counts.csv: 3 layers x 384 experts"


def test_a_trace_is_not_held_to_the_factor_that_it_replaces(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_bytes(csv_of(3, 384))
    for unused in (
        {"factor": 4.0},
        {"factor": -1.0},
        {"factor": float("nan")},
        {"factors": []},
        {"factors": [9.0] * 99},
    ):
        given: dict[str, Any] = {"trace": str(path), "ep": 2} | unused
        explorer = ImbalanceExplorer(ImbalanceParameters(**given))
        assert explorer.state.load == "trace"
        assert explorer.problem == ""
    with pytest.raises(InputError, match=r"imbalance=4.0 must lie between 0 and 2"):
        ImbalanceExplorer(ImbalanceParameters(ep=2))
    assert ImbalanceExplorer(ImbalanceParameters(slotFactor=20)).state.slotFactor == 16
    with pytest.raises(InputError, match="slotFactor=20 must lie between 0 and 16"):
        ImbalanceExplorer(ImbalanceParameters(load="A", slotFactor=20))


def test_two_widths_that_differ_are_refused() -> None:
    with pytest.raises(InputError, match="shape F=64 must be F=128"):
        WidthExplorer(WidthParameters(F=128, shape={"F": 64}))
    assert WidthExplorer(WidthParameters(shape={"F": 64})).state.F == 64


def test_a_gain_of_placement_is_claimed_for_a_trace_only(tmp_path: Path) -> None:
    for load in ("factor", "A", "table"):
        explorer = ImbalanceExplorer(ImbalanceParameters(load=load))  # type: ignore[arg-type]
        assert "re-plac" not in explorer.sentence()
        assert not {"replacedMS", "replacementGain"} & set(explorer.table())
        shown = {t["name"] for t in explorer.view.spec["data"] if len(t["x"])}
        assert "experts re-placed" not in shown
    # one hot expert to a rank of two: 3 + 1 rows against 1 + 1 become 3 + 1 and 1 + 1; nothing to
    # gain; two hot ones beside each other can be parted: 6 against 2 become 4 against 4
    path = tmp_path / "t.csv"
    path.write_text("3,3,1,1\n")
    shape: Any = {"E": 4, "K": 1}
    given = ImbalanceParameters(trace=str(path), ep=2, shape=shape)
    explorer = ImbalanceExplorer(given)
    assert "brings the largest factor from 1.5 to 1 and the time down by" in explorer.sentence()
    counts = np.array([2048 * 2 * 3 / 8 + 2048 * 2 / 8] * 2)
    placed = next(t for t in explorer.view.spec["data"] if t["name"] == "experts re-placed")
    assert list(placed["y"]) == counts.tolist()
    assert json.loads(explorer.table().to_json())["replacementGain"]["0"] > 0
