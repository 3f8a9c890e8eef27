import json
import math
import os

import pandas as pd
import pytest

from workbench.errors import InputError
from workbench.records.results import (
    REFERENCE,
    concat,
    export_results,
    load_table,
    match_pairs,
    to_document,
)

PUBLISHED = json.loads(REFERENCE.read_text())


@pytest.fixture
def document():
    return json.loads(REFERENCE.read_text())


def save(tmp_path, document):
    path = tmp_path / "results.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_published_columns_hold_the_published_values():
    table = load_table()
    for name, value in PUBLISHED["cases"][46].items():
        assert table[name][46] == value
    assert set(table["origin"]) == {"published"}
    assert set(table["device"]) == {"NVIDIA GB300"}
    assert set(table["T"]) == {2048}


def test_published_file_survives_load_table_export(tmp_path):
    export_results(load_table(), tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == PUBLISHED


def test_unknown_keys_survive_everywhere(tmp_path, document):
    document["note"] = {"by": "someone"}
    document["meta"]["driver"] = "580.1"
    document["cases"][3]["clock"] = [1, None, "x"]
    document["cases"][46]["capacity"]["spare"] = 7
    document["pairs"][5]["comment"] = "same node"
    document["allPipelinePairs"][7]["comment"] = 1.5
    path = save(tmp_path, document)
    export_results(load_table(path), tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == document


def test_a_selection_exports_with_its_own_pairs_and_counts(tmp_path):
    table = load_table()
    chosen = table[(table["ep"] == 64) & (table["precision"] == "mxfp8")]
    export_results(chosen, tmp_path / "part.json")
    part = json.loads((tmp_path / "part.json").read_text())
    ids = {c["id"] for c in PUBLISHED["cases"] if c["ep"] == 64 and c["precision"] == "mxfp8"}
    assert {c["id"] for c in part["cases"]} == ids
    assert part["pairs"] == [p for p in PUBLISHED["pairs"] if p["mok"] in ids]
    assert part["allPipelinePairs"] == [p for p in PUBLISHED["allPipelinePairs"] if p["mok"] in ids]
    assert part["meta"]["acceptedExecutions"] == len(ids)
    assert part["meta"]["rankTraces"] == 64 * len(ids)
    pd.testing.assert_frame_equal(
        load_table(tmp_path / "part.json"), chosen.reset_index(drop=True), check_column_type=False
    )


def test_winner_of_all_44_pairs():
    pairs, pipelines = match_pairs(load_table())
    assert pairs == PUBLISHED["pairs"]
    assert pipelines == PUBLISHED["allPipelinePairs"]


def own_record(**change):
    record = {k: v for k, v in PUBLISHED["cases"][8].items() if k != "capacity"}
    record["id"] = "dist_moe-inference-ep2-bf16-standard-single_layer-i1-F256-T512-D64-E8-K2"
    record |= {"ep": 2, "F": 256, "T": 512, "D": 64, "E": 8, "K": 2, "imbalance": 1.0}
    record |= {"sharedExperts": 1}
    record |= {"origin": "measured", "implementation": "workbench", "device": "CPU, 2 cores"}
    record |= {"samples": {"iterationMS": [[1.5, 1.75]]}, "provenance": {"seed": 1}}
    return record | change


def test_own_records_lie_in_one_table_with_the_published_ones(tmp_path):
    (tmp_path / "a.record.json").write_text(json.dumps(own_record()))
    own = load_table(tmp_path)
    joint = concat([load_table(), own])
    assert joint["origin"].tolist() == ["published"] * 110 + ["measured"]
    assert joint.iloc[-1][["ep", "T", "D", "E", "K"]].tolist() == [2, 512, 64, 8, 2]
    export_results(joint, tmp_path / "joint.json")
    written = json.loads((tmp_path / "joint.json").read_text())
    implied = {"sharedExperts"}  # as in the published file's meta
    assert written["cases"][-1] == {k: v for k, v in own_record().items() if k not in implied}
    again = load_table(tmp_path / "joint.json")
    assert again["protocol"].eq("").all()  # the study states its own once, at the head of its file
    pd.testing.assert_frame_equal(again, joint.assign(protocol=again["protocol"]))
    export_results(own, tmp_path / "own.json")
    meta = json.loads((tmp_path / "own.json").read_text())["meta"]
    assert (meta["hardware"], meta["T"], meta["E"]) == ("CPU, 2 cores", 512, 8)


def test_a_failed_record_has_a_reason_and_no_times(tmp_path):
    nothing = dict.fromkeys(
        [
            "iterationMS",
            "forwardMS",
            "usefulTFPerGPU",
            "meanTXGBps",
            "meanRXGBps",
            "modeledHBMGBps",
            "peakAllocatedGiB",
        ]
    )
    failed = own_record(status="failed", reason="scratch overflow", **nothing)
    (tmp_path / "f.record.json").write_text(json.dumps(failed))
    table = load_table(tmp_path / "f.record.json")
    assert math.isnan(table["iterationMS"][0])
    assert to_document(table)["cases"][0]["iterationMS"] is None
    (tmp_path / "f.record.json").write_text(json.dumps(failed | {"status": "ok"}))
    with pytest.raises(InputError, match="iterationMS must be a number"):
        load_table(tmp_path / "f.record.json")
    (tmp_path / "f.record.json").write_text(json.dumps(own_record(F=255)))
    with pytest.raises(InputError, match=r"f\.record\.json: id=.* contradicts F=255"):
        load_table(tmp_path / "f.record.json")
    (tmp_path / "f.record.json").write_text(json.dumps(own_record(origin=None)))
    with pytest.raises(InputError, match=r"f\.record\.json: origin=None: Input should be"):
        load_table(tmp_path / "f.record.json")


def change(key, value):
    def apply(document):
        document["cases"][3][key] = value

    return apply


def drop(key):
    return lambda document: document["cases"][3].pop(key)


ID = PUBLISHED["cases"][3]["id"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: d.pop("meta"), "meta: Field required"),
        (lambda d: d.pop("pairs"), "pairs: Field required"),
        (lambda d: d["meta"].pop("T"), "meta.T: Field required"),
        (drop("iterationMS"), "cases[3].iterationMS: Field required"),
        (drop("usefulTFPerGPU"), "cases[3].usefulTFPerGPU: Field required"),
        (change("ep", "16"), "cases[3].ep='16': Input should be a valid integer"),
        (change("ep", True), "cases[3].ep=True: Input should be a valid integer"),
        (change("capacity", [1]), "cases[3].capacity: Input should be a valid dictionary"),
        (change("iterationMS", -1.0), "cases[3].iterationMS=-1.0: Input should be greater than 0"),
        (change("iterationMS", 0), "cases[3].iterationMS=0: Input should be greater than 0"),
        (change("iterationMS", None), "cases[3]: iterationMS must be a number"),
        (change("iterationMS", float("nan")), "NaN is not JSON; a number must be finite"),
        (change("forwardMS", float("inf")), "Infinity is not JSON; a number must be finite"),
        (change("ep", 8), f"cases[3] ({ID}): id={ID!r} contradicts ep=8"),
        (change("F", 6144), f"cases[3] ({ID}): id={ID!r} contradicts F=6144"),
        (change("imbalance", 4.5), f"cases[3] ({ID}): id={ID!r} contradicts imbalance=4.5"),
        (change("origin", "guessed"), "cases[3].origin='guessed': Input should be 'measured'"),
        (change("K", 999), f"cases[3] ({ID}): K=999 must be at most E=384"),
        (change("id", "x"), "cases[3] (x): id='x' must read"),
        (lambda d: d["cases"].append(d["cases"][3]), f"cases[110].id={ID!r} must not occur twice"),
        (lambda d: d["pairs"][2].update(dist="x"), "pairs[2].dist='x' must name a case"),
        (
            lambda d: d["pairs"][2]["allDistPipelines"].append("x"),
            "pairs[2].allDistPipelines[1]='x' must name a case",
        ),
        (
            lambda d: d["allPipelinePairs"][9].update(mok="y"),
            "allPipelinePairs[9].mok='y' must name a case",
        ),
        (lambda d: d.update(cases={}), "cases: Input should be a valid list"),
    ],
)
def test_a_bad_file_names_file_place_and_rule(tmp_path, document, spoil, message):
    spoil(document)
    path = save(tmp_path, document)
    with pytest.raises(InputError) as error:
        load_table(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{,", "line 1, column 2: not JSON"),
        ("[]", "top level: Input should be a valid dictionary"),
        ("", "line 1, column 1: not JSON"),
        ("3", "top level=3: Input should be"),
    ],
)
def test_a_file_that_is_no_result_file(tmp_path, content, message):
    path = save(tmp_path, content)
    with pytest.raises(InputError) as error:
        load_table(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"absent\.json: cannot be read: No such file"):
        load_table(tmp_path / "absent.json")
    with pytest.raises(InputError, match=r"holds no \*\.record\.json"):
        load_table(tmp_path)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(InputError, match="not UTF-8"):
        load_table(tmp_path / "b.json")


def test_a_bad_table_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "results.json"
    export_results(load_table(), path)
    before = path.read_bytes()
    twice = concat([load_table(), load_table()])
    with pytest.raises(InputError, match="must not occur twice"):
        export_results(twice, path)
    with pytest.raises(InputError, match=r"cases\[0\].iterationMS=-5.0"):
        export_results(load_table().assign(iterationMS=-5.0), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["results.json"]
