"""What the command line says becomes cases; the commands print what the library finds."""

import json
import sys

import pytest

from workbench import cli
from workbench.case import Case
from workbench.errors import InputError
from workbench.model.calibration import load_calibration
from workbench.model.query import cases_of

ID = "mok-training-ep32-bf16-native-packing-A-F3072"


def run(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["workbench", *args])
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    return code, *capsys.readouterr()


def test_fields_make_a_product_and_the_pipeline_gives_its_backend():
    found = cases_of([], ["pipeline=mega,staged", "mode=training", "ep=32,64", "imbalance=4.5"])
    assert [(c.pipeline, c.ep) for c in found] == [
        ("mega", 32), ("mega", 64), ("staged", 32), ("staged", 64)
    ]  # fmt: skip
    assert {(c.backend, c.precision, c.imbalance) for c in found} == {("dist_moe", "mxfp8", 4.5)}


def test_ids_with_changed_fields():
    assert cases_of([ID], []) == [Case.from_id(ID)]
    found = cases_of([ID], ["precision=bf16,mxfp8", "slotFactor=4"])
    assert [c.precision for c in found] == ["bf16", "mxfp8"]
    assert {(c.profile, c.layers, c.slotFactor) for c in found} == {("A", 10, 4.0)}
    (packing,) = cases_of([], ["pipeline=standard", "mode=training", "ep=8", "profile=B"])
    assert packing.category == "packing"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["colour=red"], "'colour=red' must be NAME=VALUE with one of backend, mode"),
        (["ep"], "'ep' must be NAME=VALUE"),
        (["ep=many"], "ep='many' must be int"),
        (["ep=32", "mode=training"], "backend, precision, pipeline must be given"),
        (["pipeline=native", "mode=training", "ep=32"], "precision must be given"),
        (["pipeline=hyper", "mode=training", "ep=32"], "backend, precision must be given"),
        (["pipeline=mega", "mode=training", "ep=7"], "E=384 must be divisible by ep=7"),
        (["pipeline=mega", "mode=training", "ep=8", "imbalance=9"], "imbalance=9.0 must lie"),
    ],
)
def test_what_is_no_case_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        cases_of([], given)


def test_predict_prints_what_the_calibration_says(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "predict", ID, "--json")
    assert (code, err) == (0, "")
    (row,) = json.loads(out)
    expected = load_calibration().predict([Case.from_id(ID)]).iloc[0]
    assert row["iterationMS"] == pytest.approx(expected["iterationMS"], rel=1e-6)
    assert row["extrapolated"] is False
    assert row["origin"] == "predicted"
    code, out, _ = run(monkeypatch, capsys, "predict", ID, "--device", "GB200")
    assert code == 0
    assert "device" in out
    code, out, err = run(monkeypatch, capsys, "predict", ID, "--device", "GB1")
    assert (code, out) == (2, "")
    assert err.startswith("error: hardware=GB1 must be one of")


def test_calibrate_writes_a_file_that_predict_reads(monkeypatch, capsys, tmp_path):
    path = tmp_path / "c.json"
    assert run(monkeypatch, capsys, "calibrate", "--out", str(path))[0] == 0
    assert load_calibration(path).device == "GB300"
    code, out, _ = run(monkeypatch, capsys, "predict", ID, "--calibration", str(path), "--json")
    assert code == 0
    assert json.loads(out)[0]["iterationMS"] == pytest.approx(102.7, rel=0.01)
    code, out, _ = run(monkeypatch, capsys, "calibrate", "--json")
    assert json.loads(out)["cases"] == 110


def test_validate_prints_every_protocol(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "calibrate", "--validate", "--json")
    assert code == 0
    assert len(json.loads(out)["protocols"]) == 11
    code, out, _ = run(monkeypatch, capsys, "calibrate", "--validate")
    assert "leave one workload out" in out
    assert "goal met" in out
    assert "MISSED" not in out
