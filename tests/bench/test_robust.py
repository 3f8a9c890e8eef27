"""Whatever ends a sweep, whenever: resumed, it has every case once and nothing corrupt."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import needs
from tests.bench.conftest import QUICK
from workbench.bench.interleave import run_pair
from workbench.bench.job import Settings, TimingProtocol
from workbench.bench.launch import Hosts
from workbench.bench.matrix import load_matrix
from workbench.bench.sweep import SweepError, alone, open_sweep, run_sweep
from workbench.case import Case
from workbench.errors import InputError
from workbench.records.record import read_record

SEEDS = int(os.environ.get("WORKBENCH_FAULT_SEEDS", "4"))
"""Moments at which each fault is tried: a few in continuous integration, more by hand."""
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "06_sweep.ipynb"
CLI = [sys.executable, "-m", "workbench.cli"]
SHORT = ["--warmups=0", "--windows=1", "--iterations=40", "--ranks=2"]
MATRIX = """\
pipeline: [standard, alltoall]
mode: [inference, training]
ep: 2
T: 8
D: 16
F: 16
"""
SECONDS = 4.0
"""Within which a disturbance falls; the start of the ranks is part of that."""


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(MATRIX)
    return path


@pytest.fixture
def lone_matrix(tmp_path: Path) -> Path:
    """Of one rank, which starts sooner: for what has nothing to do with peers."""
    path = tmp_path / "lone.yaml"
    path.write_text(MATRIX.replace("ep: 2", "ep: 1"))
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    needs.permitted("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def processes(marks: str) -> dict[int, str]:
    """Command line by pid of the processes whose own has `marks` in it."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if marks in line:
                found[int(entry.name)] = line
    return found


def ranks_of(out: Path) -> list[int]:
    return [
        pid
        for pid, line in processes(str(out)).items()
        if "bench.worker" in line and "bench.torchrun" not in line
    ]


def start(matrix: Path, out: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*CLI, "sweep", str(matrix), "--out", str(out), *SHORT],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=needs.heeded_signals,
    )


def resumed_well(out: Path, matrix: Path) -> str:
    """Resumes and checks; what the command said on stderr."""
    command = [*CLI, "sweep", str(matrix), "--out", str(out), *SHORT]
    if (out / "sweep.json").exists():  # it may have ended before it was a sweep
        command.append("--resume")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    cases = load_matrix(matrix)
    assert f"{len(cases)} of {len(cases)} cases measured, 0 failed" in done.stdout
    good = sorted(path.name for path in (out / "records").glob("*.record.json"))
    assert good == sorted(f"{case.id}.record.json" for case in cases)
    for name in good:
        assert read_record(out / "records" / name).status == "ok"
    others = {path.name for path in (out / "records").iterdir()} - set(good)
    assert all(name.endswith(".corrupt") for name in others)
    assert processes(str(out)) == {}
    return done.stderr


def wait_gone(out: Path) -> None:
    """What the sweep started ends by itself."""
    end = time.monotonic() + 15
    while processes(str(out)):
        assert time.monotonic() < end, processes(str(out))
        time.sleep(0.05)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_killed_rank(matrix: Path, tmp_path: Path, seed: int) -> None:
    out, moment = tmp_path / "run", random.Random(seed)
    driver = start(matrix, out)
    end = time.monotonic() + 30
    while not ranks_of(out) and driver.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(moment.uniform(0, SECONDS - 2))
    pids = ranks_of(out)
    for pid in pids[: 1 + seed % 2]:
        os.kill(pid, signal.SIGKILL)
    driver.communicate(timeout=90)
    assert driver.returncode in (0, 1)  # the sweep went on by itself
    failed = [
        r
        for path in (out / "records").glob("*.record.json")
        if (r := read_record(path)).status == "failed"
    ]
    assert all("ended by SIGKILL" in str(record.reason) for record in failed)
    assert len(failed) <= 1
    resumed_well(out, matrix)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_killed_or_interrupted_driver(lone_matrix: Path, tmp_path: Path, seed: int) -> None:
    out, moment = tmp_path / "run", random.Random(100 + seed)
    driver = start(lone_matrix, out)
    time.sleep(moment.uniform(0.8, SECONDS))
    before = {p: p.read_bytes() for p in (out / "records").glob("*.record.json")}
    how = (signal.SIGKILL, signal.SIGKILL, signal.SIGINT)[seed % 3]
    driver.send_signal(how)
    _, told = driver.communicate(timeout=30)
    if how == signal.SIGINT and driver.returncode != 0:
        assert driver.returncode == 130
        assert "goes on from here" in told or not (out / "sweep.json").exists()
    wait_gone(out)
    resumed_well(out, lone_matrix)
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize("seed", range(SEEDS - 1))
def test_a_full_disk(lone_matrix: Path, small_disk: Path, seed: int) -> None:
    out, moment = small_disk / "run", random.Random(200 + seed)
    driver = start(lone_matrix, out)
    time.sleep(moment.uniform(0.5, SECONDS))
    fill = small_disk / "fill"
    with fill.open("wb", buffering=0) as file:
        for size in (4096, 512, 64, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    _, told = driver.communicate(timeout=90)
    assert driver.returncode in (0, 1, 2)
    if driver.returncode == 2:
        assert "No space left on device" in told
        assert told.count("error: ") == 1
    fill.unlink()
    resumed_well(out, lone_matrix)


@pytest.mark.parametrize("seed", range(SEEDS - 2))
def test_a_truncated_record(lone_matrix: Path, tmp_path: Path, seed: int) -> None:
    out, moment = tmp_path / "run", random.Random(300 + seed)
    driver = start(lone_matrix, out)
    end = time.monotonic() + 30
    while not (records := list((out / "records").glob("*.record.json"))):
        assert time.monotonic() < end
        time.sleep(0.01)
    driver.kill()
    driver.communicate()
    wait_gone(out)
    path = moment.choice(records)
    whole = path.read_bytes()
    path.write_bytes(whole[: moment.randrange(len(whole) - 1)])
    told = resumed_well(out, lone_matrix)
    assert f"{path}: " in told
    assert "measured again" in told


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_notebook_kernel(matrix: Path, tmp_path: Path, seed: int) -> None:
    out, run = tmp_path / "run", tmp_path / "executed"
    given = {
        "matrix": matrix,
        "sweep_dir": out,
        "ranks": 2,
        "warmups": 0,
        "windows": 1,
        "iterations": 40,
        "formats": "[]",
    }
    command = [*CLI, "run", str(NOTEBOOK), "--out", str(run)]
    for name, value in given.items():
        command += ["-p", f"{name}={value}"]
    runner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (out / "sweep.json").exists():
        assert time.monotonic() < end
        assert runner.poll() is None
        time.sleep(0.01)
    time.sleep(random.Random(400 + seed).uniform(0, SECONDS - 2))
    torchruns = [pid for pid, line in processes(str(out)).items() if "bench.torchrun" in line]
    for pid in {_parent(pid) for pid in torchruns}:
        os.kill(pid, signal.SIGKILL)  # the kernel started them
    _, told = runner.communicate(timeout=60)
    assert runner.returncode == (1 if torchruns else 0), told
    wait_gone(out)
    resumed_well(out, matrix)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


CASE = Case(
    backend="dist_moe",
    mode="training",
    ep=2,
    precision="bf16",
    pipeline="standard",
    F=16,
    T=8,
    D=16,
    E=4,
    K=2,
)


def test_a_hang_ends_with_the_stacks_of_every_rank(tmp_path: Path) -> None:
    endless = Settings(protocol=TimingProtocol(warmups=0, windows=1, iterations=10**8))
    sweep = open_sweep(tmp_path / "run", [CASE], settings=endless, ranks=2, limit_s=2.0)
    final = run_sweep(sweep)
    assert (final.done, final.failed) == (1, 1)
    reason = read_record(sweep.folder.record(CASE)).reason
    assert reason == f"no end within limit_s=2; stacks of every rank in {sweep.folder.logs}"
    logs = sorted(sweep.folder.logs.glob("*.rank?.log"))
    assert len(logs) == 2
    for log in logs:
        text = log.read_text()
        assert "most recent call first" in text
        assert "in measure_case" in text


def test_a_stopped_rank_does_not_hold_the_sweep_for_ever(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("workbench.bench.launch.GRACE_S", 2.0)
    monkeypatch.setattr("workbench.bench.launch.END_S", 0.5)
    endless = Settings(protocol=TimingProtocol(warmups=0, windows=1, iterations=10**8))
    sweep = open_sweep(tmp_path / "run", [CASE], settings=endless, ranks=2, limit_s=2.0)

    def stop(progress) -> None:
        if progress.running:
            for pid in ranks_of(sweep.folder.path):
                os.kill(pid, signal.SIGSTOP)

    assert run_sweep(sweep, stop).failed == 1
    reason = str(read_record(sweep.folder.record(CASE)).reason)
    assert reason.startswith("no end within limit_s=2; ranks did not answer")
    wait_gone(sweep.folder.path)


def test_ranks_that_cannot_be_started(tmp_path: Path) -> None:
    broken = Hosts(environment=(("GLOO_SOCKET_IFNAME", "no-such-device"),))
    sweep = open_sweep(tmp_path / "run", [CASE], settings=QUICK, ranks=2, hosts=broken)
    with pytest.raises(SweepError, match=r"ranks could not be started: rank \d: .*no-such-device"):
        run_sweep(sweep)
    assert not list(sweep.folder.path.rglob("*.record.json"))


def test_one_driver_at_a_time(tmp_path: Path) -> None:
    sweep = open_sweep(tmp_path / "run", [CASE], settings=QUICK, ranks=2)
    with alone(sweep.folder), pytest.raises(InputError, match="measured by another process"):
        run_sweep(sweep)


def test_two_runs_take_turns(tmp_path: Path) -> None:
    cases = [CASE, Case(**{**CASE.__dict__, "mode": "inference"})]
    pair = [
        open_sweep(tmp_path / name, cases, settings=QUICK, ranks=2, limit_s=60) for name in "ab"
    ]
    told: list[str] = []
    tell: Callable[..., None] = lambda name, p: p.record and told.append(name)  # noqa: E731
    finals = run_pair(pair[0], pair[1], tell)
    assert [(final.done, final.failed) for final in finals] == [(2, 0), (2, 0)]
    times = {}
    for name, sweep in zip("AB", pair, strict=True):
        for case in cases:
            times[name, case.id] = sweep.folder.record(case).stat().st_mtime_ns
    order = [name for name, _ in sorted(times, key=lambda key: times[key])]
    assert order == ["A", "B", "B", "A"]
    assert sorted(told) == ["A", "A", "B", "B"]


@pytest.mark.parametrize("torchrun_too", [False, True])
def test_ranks_do_not_outlive_what_started_them(
    lone_matrix: Path, tmp_path: Path, torchrun_too: bool
) -> None:
    out = tmp_path / "run"
    driver = subprocess.Popen(
        [
            *CLI,
            "sweep",
            str(lone_matrix),
            "--out",
            str(out),
            "--ranks=2",
            "--warmups=0",
            "--iterations=100000000",
        ]
    )
    end = time.monotonic() + 30
    while not (out / "events.jsonl").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    (torchrun,) = (pid for pid, line in processes(str(out)).items() if "bench.torchrun" in line)
    driver.kill()
    if torchrun_too:
        os.kill(torchrun, signal.SIGKILL)
    driver.wait()
    wait_gone(out)
