"""The ledger of kernels: read as it was written, refused where it is wrong, never a mix of what was
measured and what was simulated."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from workbench.kernels.ops import Sizes

from workbench.bench.ledger import (
    COLUMNS,
    Entry,
    kernel_lines,
    ledger_dir,
    newest,
    read_entries,
    read_entry,
    run_text,
    title,
    write_entry,
)
from workbench.errors import InputError

ROOT = Path(__file__).parents[2]
SIZES = {"T": 2048, "D": 7168, "F": 3072, "E": 384, "K": 6, "ep": 64, "dtype": "bfloat16"}


def content(**changed: Any) -> dict[str, Any]:
    timed = {
        "op": "dispatch_w13",
        "values_passed": True,
        "error": 1e-3,
        "method": "graph",
        "time_us": 2000.0,
        "floor_us": 1000.0,
        "bound_by": "matrix units",
        "fraction_of_floor": 0.5,
    }
    wrong = {"op": "swiglu", "values_passed": False, "error": 0.5, "reason": "wrong by 0.5"}
    return {
        "origin": "measured",
        "device": "NVIDIA H200",
        "driver": "580.65.06",
        "versions": {"torch": "2.14.1"},
        "git": {"commit": "0123456789abcdef", "changed": False},
        "when": "2026-12-03T10:00:00+00:00",
        "sizes": SIZES,
        "kernels": [timed, wrong],
        "peers": [{"name": "cuBLAS", "op": "dispatch_w13", "time_us": 1500.0}],
    } | changed


def entry(**changed: Any) -> Entry:
    return Entry.model_validate(content(**changed))


SIMULATED = {"origin": "simulated", "device": "simulated", "when": "2026-12-04T10:00:00+00:00"}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write_entry(entry(), tmp_path)
    assert path.name == "20261203-100000-nvidia-h200.json"
    assert read_entry(path) == entry()
    write_entry(entry(when="2026-12-03T14:00:00+02:00"), tmp_path)
    assert [e.when[11:13] for e in read_entries(tmp_path)] == ["14", "10"]
    assert read_entries(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"origin": "simulated"}, "origin=simulated must be simulated for device simulated alone"),
        ({"device": "simulated"}, "origin=measured must be simulated for device simulated alone"),
        ({"when": "2026-12-03T10:00:00"}, "when=2026-12-03T10:00:00 must say its time zone"),
        ({"colour": 1}, "colour=1: Extra inputs are not permitted"),
        ({"sizes": SIZES | {"T": 0}}, "sizes.T=0: Input should be greater than or equal to 1"),
        ({"kernels": [{"op": "a", "values_passed": True}]}, "a: must have a time or a reason"),
        (
            {"kernels": [{"op": "a", "values_passed": False, "time_us": 1.0}]},
            "a: must have no time, as its values are wrong",
        ),
        (
            {
                "kernels": [
                    {"op": "a", "values_passed": True, "time_us": 2.0, "floor_us": 1.0}
                    | {"fraction_of_floor": 0.9}
                ]
            },
            "a: fraction_of_floor must be 0.5",
        ),
        (
            {"kernels": [{"op": "a", "values_passed": False, "reason": "b"}] * 2},
            "kernels: an op must not be there twice",
        ),
    ],
)
def test_what_is_wrong_is_refused_in_a_line(
    tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    path = tmp_path / "e.json"
    path.write_text(json.dumps(content(**changed)))
    with pytest.raises(InputError) as error:
        read_entry(path)
    assert str(error.value).startswith(f"{path}: ")
    assert told in str(error.value)


def test_tables_show_the_newest_of_the_device_at_its_sizes() -> None:
    old = entry(when="2026-12-01T10:00:00+00:00", kernels=[])
    entries = [entry(), old]
    assert run_text(entries, "H200", "dispatch_w13", Sizes()) == (
        "2,000.0 us, 50% of its floor (2026-12-03)"
    )
    assert run_text(entries, "H200", "swiglu", Sizes()) == "not timed: wrong by 0.5"
    assert run_text(entries, "H200", "sum_k", Sizes()) == "not run on a GPU"
    assert run_text(entries, "B200", "dispatch_w13", Sizes()) == "not run on a GPU"
    assert run_text(entries, "H200", "dispatch_w13", Sizes(ep=32)) == "not run at these sizes"


def test_what_is_simulated_is_never_shown_as_measured() -> None:
    entries = [entry(**SIMULATED), entry()]
    found = newest(entries, "H200")
    assert found is not None
    assert found.origin == "measured"
    assert newest([entry(**SIMULATED)], "H200") is None
    assert run_text([entry(**SIMULATED)], "H200", "dispatch_w13", Sizes()) == "not run on a GPU"
    rehearsed = newest(entries, "", "simulated")
    assert rehearsed is not None
    assert title(rehearsed).startswith("SIMULATED, no measurement")
    assert title(found).startswith("measured on NVIDIA H200, driver 580.65.06")


def test_a_line_for_each_op_and_peer() -> None:
    lines = kernel_lines(entry())
    assert {len(line) for line in lines} == {len(COLUMNS)}
    assert lines[0][:5] == ("dispatch_w13", "as its twin", "2,000.0", "1,000.0", "50%")
    assert (lines[1][1], lines[1][2], lines[1][-1]) == ("WRONG", "-", "wrong by 0.5")
    assert lines[2][-1] == "dispatch_w13 runs at 0.75 of its rate"


def test_measured_entries_are_kept_in_git_and_simulated_ones_are_not() -> None:
    def ignored(name: str) -> bool:
        command = ["git", "-C", str(ROOT), "check-ignore", "-q", "--no-index", name]
        return subprocess.run(command, check=False).returncode == 0

    assert not ignored("outputs/gpu/20261203-100000-nvidia-h200.json")
    assert ignored("outputs/gpu/20261203-100000-simulated.json")
    assert ignored("outputs/gpu/notes.txt")
    assert ignored("outputs/runs/x/run.json")


def test_it_lies_in_the_checkout_or_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ledger_dir() == tmp_path / "outputs/gpu"
    monkeypatch.chdir(ROOT / "tests")
    assert ledger_dir() == ROOT / "outputs/gpu"
