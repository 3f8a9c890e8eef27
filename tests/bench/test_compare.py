"""A comparison that does not lie: verdicts from intervals, on samples whose truth is known."""

import math

import numpy as np
import pytest

from workbench.bench.compare import compare, ratio_interval, verdict
from workbench.case import local_matrix
from workbench.errors import InputError
from workbench.records.record import make_record, read_record, write_record

CASES = local_matrix()[4:8]


def write_run(folder, windows, cases=CASES, device="CPU test", **found):
    for case in cases:
        ms = float(np.median(windows))
        own = {
            "iterationMS": ms,
            "forwardMS": ms,
            "backwardMS": ms,
            "samples": {"slowestRank": {"iteration": list(windows)}},
        }
        record = make_record(case, device, own | found, {})
        write_record(record, folder / f"{case.id}.record.json")
    return folder


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.99, 1.01, "same"),
        (1.001, 1.01, "same"),
        (0.8, 0.9, "faster"),
        (1.1, 1.3, "slower"),
        (0.9, 1.1, "undecided"),
        (0.97, 0.999, "faster"),
        (0.99, 1.03, "undecided"),
    ],
)
def test_verdicts(low, high, said):
    assert verdict(low, high) == said


def test_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        a, b = np.exp(rng.normal(0, 0.05, 5)), 1.1 * np.exp(rng.normal(0, 0.1, 5))
        _, low, high = ratio_interval(list(a), list(b))
        hits += low <= 1.1 <= high
    assert 0.92 <= hits / 400 <= 0.99


def test_runs_are_paired_case_by_case(tmp_path):
    a = write_run(tmp_path / "a", [10, 10.01, 9.99, 10, 10.005])
    for factor, said in ((1.0, "same"), (0.8, "faster"), (1.3, "slower")):
        times = [10 * factor, 10.01 * factor, 9.99 * factor]
        b = write_run(tmp_path / f"b{factor}", times)
        found = compare(a, b)
        assert found["verdict"].tolist() == [said] * len(CASES)
        assert found["ratio"].tolist() == pytest.approx([factor] * len(CASES), rel=0.01)
    noisy = write_run(tmp_path / "noisy", [5, 20, 10])
    assert set(compare(a, noisy)["verdict"]) == {"undecided"}


def test_what_cannot_be_told_says_why(tmp_path):
    a = write_run(tmp_path / "a", [10, 10.1, 9.9])
    one = compare(a, write_run(tmp_path / "one", [8.0]))
    assert set(one["why"]) == {"fewer than two windows"}
    assert math.isinf(one["high"][0])
    failed = write_run(tmp_path / "failed", [1], status="failed", reason="no memory")
    assert set(compare(a, failed)["why"]) == {"B: failed: no memory"}
    other = compare(a, write_run(tmp_path / "other", [5, 5.1, 4.9], device="GPU"))
    assert set(other["verdict"]) == {"undecided"}
    assert set(other["why"]) == {"devices differ: CPU test / GPU"}
    part = compare(a, write_run(tmp_path / "part", [5, 5.1, 4.9], cases=CASES[:1]))
    assert part["verdict"].tolist() == ["faster"] + ["undecided"] * 3
    assert part["why"].tolist()[1:] == ["B: no such case"] * 3


def test_runs_that_cannot_be_compared(tmp_path):
    a = write_run(tmp_path / "a", [10, 10.1])
    b = write_run(tmp_path / "b", [10, 10.1], cases=local_matrix()[8:9])
    with pytest.raises(InputError, match="have no case in common"):
        compare(a, b)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty: holds no \*.record.json"):
        compare(a, tmp_path / "empty")
    for wrong in (tmp_path / "gone", next(a.iterdir())):
        with pytest.raises(InputError, match=f"{wrong.name}: must be a folder with records"):
            compare(a, wrong)
    with pytest.raises(InputError, match="metric='speed' must be one of"):
        compare(a, a, "speed")


def test_a_record_is_checked_when_written_and_read(tmp_path):
    (folder,) = [write_run(tmp_path / "a", [1, 1], cases=CASES[:1])]
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    assert read_record(path).id == CASES[0].id
    for cut in (0, 1, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match=r"record\.json: "):
            read_record(path)
    path.write_bytes(whole)
    moved = path.rename(path.with_name("other.record.json"))
    with pytest.raises(InputError, match="must be the name of the file"):
        read_record(moved)
    record = make_record(CASES[0], "CPU", {"iterationMS": 1.0, "forwardMS": 1.0}, {})
    bad = record.model_copy(update={"iterationMS": -1.0})
    with pytest.raises(InputError, match=r"iterationMS=-1\.0"):
        write_record(bad, tmp_path / "bad.record.json")
    assert not (tmp_path / "bad.record.json").exists()
