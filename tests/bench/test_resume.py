"""A sweep is resumed as it was started: what is asked beside that is refused, never ignored."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.bench.job import Settings, TimingProtocol
from workbench.bench.launch import Hosts
from workbench.bench.matrix import load_matrix
from workbench.bench.sweep import Sweep, open_sweep
from workbench.errors import InputError
from workbench.records.record import make_record, write_record
from workbench.runner.notebook_sweep import SweepParameters, measure

CLI = [sys.executable, "-m", "workbench.cli"]
KEPT = Settings(protocol=TimingProtocol(warmups=0, windows=2, iterations=3), seed=5)
MATRIX = """
pipeline: standard
mode: [inference, training]
ep: 2
profiles: {mine: [0.5, 1.5]}
profile: mine
T: 8
D: 16
F: 16
E: 4
K: 2
sharedExperts: 0
"""


def finish(sweep: Sweep) -> None:
    """Records as if every case had been measured, so that nothing is left to start ranks for."""
    for case in sweep.cases:
        back = {"backwardMS": 1.0} if case.mode == "training" else {}
        record = make_record(case, "CPU test", {"iterationMS": 1.0, "forwardMS": 1.0} | back, {})
        write_record(record, sweep.folder.record(case))


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(MATRIX)
    return path


@pytest.fixture
def done(tmp_path: Path, matrix: Path) -> Path:
    sweep = open_sweep(tmp_path / "run", load_matrix(matrix), settings=KEPT, ranks=2, limit_s=60)
    finish(sweep)
    return sweep.folder.path


def command(*options: object) -> "subprocess.CompletedProcess[str]":
    told = subprocess.run(
        [*CLI, "sweep", *map(str, options)], capture_output=True, text=True, check=False, timeout=60
    )
    assert "Traceback" not in told.stderr
    return told


def refused(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) <= 500
    return done.stderr.removeprefix("error: ").rstrip("\n")


def test_a_folder_without_a_sweep(tmp_path: Path, matrix: Path) -> None:
    for own in ([], [matrix]):
        told = refused(command(*own, "--resume", "--out", tmp_path / "WRONG"))
        assert told == f"out={tmp_path}/WRONG holds no sweep to resume"
        assert not (tmp_path / "WRONG").exists()


@pytest.mark.parametrize(
    ("option", "kept", "given"),
    [
        ("--windows=3", "windows=2", "windows=3"),
        ("--windows=5", "windows=2", "windows=5"),  # the default, but given
        ("--warmups=1", "warmups=0", "warmups=1"),
        ("--iterations=30", "iterations=3", "iterations=30"),
        ("--seed=0", "seed=5", "seed=0"),
        ("--device=cuda", "device=cpu", "device=cuda"),
        ("--limit-s=600", "limit_s=60", "limit_s=600.0"),
        ("--trace", "trace=False", "trace=True"),
    ],
)
def test_another_option_is_refused(done: Path, option: str, kept: str, given: str) -> None:
    told = refused(command("--resume", "--out", done, option))
    rest = "leave that out or name another folder"
    assert told == f"out={done} was measured with {kept}, not {given}; {rest}"


def test_all_that_differs_is_named(done: Path) -> None:
    told = refused(command("--resume", "--out", done, "--windows=9", "--iterations=3", "--seed=1"))
    assert "was measured with windows=2, seed=5, not windows=9, seed=1; " in told


def test_equal_options_and_none_are_fine(done: Path, matrix: Path) -> None:
    equal = [
        "--windows=2",
        "--warmups=0",
        "--iterations=3",
        "--seed=5",
        "--device=cpu",
        "--limit-s=60",
    ]
    for options in ([], [matrix], equal, [matrix, *equal]):
        told = command("--resume", "--out", done, "--ranks=2", *options)
        assert told.returncode == 0, told.stderr
        assert "2 of 2 cases measured, 0 failed" in told.stdout


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (("F: 16", "F: [16, 32]"), "it has no dist_moe-"),
        (("mode: [inference, training]", "mode: training"), "not asked for is its dist_moe-inf"),
        (("0.5, 1.5", "1.5, 0.5"), "factors=(0.5, 1.5), not (1.5, 0.5), in dist_moe-"),  # same ids
    ],
)
def test_another_matrix_is_refused(
    done: Path, matrix: Path, changed: tuple[str, str], told: str
) -> None:
    matrix.write_text(MATRIX.replace(*changed))
    line = refused(command(matrix, "--resume", "--out", done))
    assert line.startswith(f"out={done} holds a sweep of other cases: {told}")


def test_an_invalid_matrix_is_refused(done: Path, matrix: Path) -> None:
    matrix.write_text("mode: sideways\n")
    assert "sideways" in refused(command(matrix, "--resume", "--out", done))
    assert "matrix=lokal must be" in refused(command("lokal", "--resume", "--out", done))


def test_the_same_from_python_and_from_the_notebook(done: Path, matrix: Path) -> None:
    cases = load_matrix(matrix)
    other = replace(KEPT, protocol=replace(KEPT.protocol, windows=4))
    text = "was measured with windows=2, not windows=4"
    with pytest.raises(InputError, match=text):
        open_sweep(done, cases, settings=other, ranks=2, resume=True)
    assert open_sweep(done, cases, settings=KEPT, ranks=2, resume=True).settings == KEPT
    given = {
        "matrix": str(matrix),
        "sweep_dir": str(done),
        "ranks": 2,
        "warmups": 0,
        "iterations": 3,
        "seed": 5,
        "limit_s": 60.0,
        "out_dir": str(done),
    }
    with pytest.raises(InputError, match=text):
        measure(SweepParameters.model_validate(given | {"windows": 4}), done)
    with pytest.raises(InputError, match="was measured with limit_s=60, not limit_s=61"):
        measure(SweepParameters.model_validate(given | {"windows": 2, "limit_s": 61.0}), done)
    assert measure(SweepParameters.model_validate(given | {"windows": 2}), done).left() == []


def test_a_second_run_is_resumed_in_its_own_environment(done: Path, tmp_path: Path) -> None:
    cases = open_sweep(done, ranks=2, resume=True).cases
    hosts = Hosts(environment=(("OMP_NUM_THREADS", "2"),))
    b = tmp_path / "b"
    finish(open_sweep(b, cases, settings=KEPT, ranks=2, limit_s=60, hosts=hosts))
    state = json.loads((b / "sweep.json").read_text())
    assert state["environment"] == {"OMP_NUM_THREADS": "2"}
    assert open_sweep(b, ranks=2, resume=True).hosts.environment == hosts.environment
    pair = ["--resume", "--out", done, "--beside", b, "--ranks=2"]
    assert command(*pair).returncode == 0
    assert command(*pair, "--beside-env", "OMP_NUM_THREADS=2").returncode == 0
    told = refused(command(*pair, "--beside-env", "OMP_NUM_THREADS=1"))
    assert told.startswith(f"out={b} was measured with environment={{'OMP_NUM_THREADS': '2'}}, not")


def test_a_second_run_that_is_wrong(done: Path, tmp_path: Path) -> None:
    resume = ["--resume", "--out", done, "--ranks=2"]
    wrong = tmp_path / "WRONG"
    told = refused(command(*resume, "--beside", wrong))
    assert told == f"beside={wrong} holds no sweep to resume"
    assert not wrong.exists()
    told = refused(command(*resume, "--beside", done))
    assert told == f"beside={done} must be another folder than --out"
    told = refused(command(*resume, "--beside-env", "A=1"))
    assert told == "--beside-env needs --beside"
    cases = open_sweep(done, ranks=2, resume=True).cases
    other = tmp_path / "other"
    finish(open_sweep(other, cases, settings=replace(KEPT, seed=6), ranks=2, limit_s=60))
    told = refused(command(*resume, "--beside", other))
    assert told.startswith(f"out={other} was measured with seed=6, not seed=5; ")
