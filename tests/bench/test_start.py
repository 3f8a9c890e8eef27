"""Starts of ranks: what they depend on is passed to them, checked before, and has a time limit."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workbench import cuda
from workbench.bench import launch as launching
from workbench.bench import machine, matrix, sweep
from workbench.bench.doctor import cuda_problem
from workbench.bench.job import Folder, Job, Settings, TimingProtocol
from workbench.bench.launch import Hosts, JobRun, run_jobs
from workbench.bench.matrix import check_memory, load_matrix
from workbench.bench.probe import HostFacts
from workbench.bench.sweep import default_ranks, open_sweep
from workbench.case import LOCAL_SHAPE, Case, local_matrix
from workbench.domain import this_host
from workbench.errors import InputError

SETTINGS = Settings(protocol=TimingProtocol(warmups=0, windows=1, iterations=1))


def case(**given: object) -> Case:
    stated = {
        "backend": "dist_moe",
        "mode": "inference",
        "ep": 2,
        "precision": "bf16",
        "pipeline": "standard",
        "F": 64,
        **LOCAL_SHAPE,
    }
    return Case(**stated | given)  # type: ignore[arg-type]


@pytest.fixture
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's list of GPUs with one entry."""
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(sweep, "cuda_problem", lambda ranks, peers: None)
    monkeypatch.setattr(cuda, "GPUS", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("one_gpu")
def test_ranks_follow_the_device_that_is_used(tmp_path: Path) -> None:
    assert default_ranks("cuda") == 1
    assert default_ranks("cpu") == max(len(os.sched_getaffinity(0)), 2)
    opened = open_sweep(tmp_path / "cpu", local_matrix())
    assert {case.ep for case in opened.cases} == {1, 2}
    with pytest.raises(InputError, match="ep=2 must be at most ranks=1"):
        open_sweep(tmp_path / "cuda", local_matrix(), settings=Settings(device="cuda"))
    assert not (tmp_path / "cuda").exists()


def test_a_host_without_gpus_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """By the doctor's first check that fails, which says what to do."""
    facts = HostFacts(here=this_host(), nvml_problem="NVML: not found")
    with pytest.raises(InputError) as wanted:
        raise InputError(cuda_problem(1, probe=lambda: facts))
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this host has a driver")
    done = subprocess.run(
        [sys.executable, "-m", "workbench.cli", "sweep", "--device=cuda", f"--out={tmp_path}/s"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: device='cuda': driver=none must be loaded: NVML: ")
    assert done.stderr.rstrip().endswith(str(wanted.value).partition("; ")[2])
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_the_environment_of_another_launcher_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host name that does not resolve, and options of torchrun as variables."""
    monkeypatch.setenv("PET_NNODES", "4")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "nowhere.invalid:1")
    hosts = ["env", "LOCALDOMAIN=invalid", "unshare", "--uts", "sh", "-c"]
    alone = hosts if subprocess.run([*hosts, "hostname x"], check=False).returncode == 0 else None
    command = [
        sys.executable,
        "-m",
        "workbench.cli",
        "sweep",
        str(_lone(tmp_path)),
        "--out",
        str(tmp_path / "s"),
        "--warmups=0",
        "--windows=1",
        "--iterations=1",
    ]
    if alone:  # root in a container that may have a host name of its own
        command = [*alone, f"hostname no-such-host-{os.getpid()} && exec {' '.join(command)}"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 cases measured, 0 failed" in done.stdout
    assert time.monotonic() - began < launching.START_S


def _lone(folder: Path) -> Path:
    path = folder / "m.yaml"
    path.write_text("pipeline: standard\nmode: inference\nep: 2\nF: 64\nT: 8\nD: 16\nE: 4\nK: 2\n")
    return path


def test_a_start_that_hangs_ends_at_its_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "START_S", 1.0)
    monkeypatch.setattr(launching, "command", lambda *_: ["sleep", "60"])
    job = Job(name="j", cases=(case(),), settings=SETTINGS, limit_s=600.0)
    began = time.monotonic()
    (ended,) = run_jobs(JobRun(job, Folder(tmp_path), Hosts()))
    assert time.monotonic() - began < 30
    assert ended.reason.startswith(
        "no rank began within 1 s; they meet at 127.0.0.1, which must be an address of this host"
    )
    two = Hosts(nnodes=2, rdzv="node0:29400")
    monkeypatch.setattr(launching, "START_S", 0.5)
    (ended,) = run_jobs(
        JobRun(
            Job(name="k", cases=(case(),), settings=SETTINGS, limit_s=1.0), Folder(tmp_path), two
        )
    )
    assert ended.reason.startswith("no rank began within 1 s; they meet at rdzv=node0:29400")
    assert "--local-addr" in ended.reason


def test_all_that_a_start_depends_on_is_on_its_command_line(tmp_path: Path) -> None:
    job = Job(name="j", cases=(case(),), settings=SETTINGS, limit_s=600.0)
    found = launching.command(
        job, tmp_path / "j.json", Folder(tmp_path), Hosts(), tmp_path / "failures"
    )
    for option in (
        "--nnodes=1",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=2",
    ):
        assert option in found
    named = launching.command(
        job, tmp_path, Folder(tmp_path), Hosts(local_addr="10.0.0.7"), tmp_path / "failures"
    )
    assert "--local-addr=10.0.0.7" in named
    assert "--rdzv-endpoint=10.0.0.7:0" in named


@pytest.mark.parametrize("value", ["0", "abc", "", "-1", "2.5"])
def test_threads_that_are_no_number_are_refused_before_ranks_start(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = f"OMP_NUM_THREADS='{value}' in the environment must be an integer of at least 1"
    with pytest.raises(InputError, match=rule):
        Hosts(environment=(("OMP_NUM_THREADS", value),))
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(InputError, match=rule):
        Hosts()


def test_what_cannot_be_measured_yet_is_refused_at_once(tmp_path: Path) -> None:
    rule = (
        "pipeline=mega mxfp8, staged mxfp8, standard .*|pipeline=.* cannot be measured yet, only"
        " standard, alltoall in bf16"
    )
    with pytest.raises(InputError, match=rule):
        open_sweep(tmp_path / "s", load_matrix("reference"), ranks=64)
    assert not (tmp_path / "s").exists()


def test_what_the_plan_knows_to_be_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = case()
    check_memory([small], 1 << 30)
    large = case(ep=2, T=2048, D=7168, E=384, K=6, F=3072)
    # 192 experts and a shared one of 3 x 7168 x 3072 BF16 weights on each of two ranks
    weights = 2 * 193 * 3 * 7168 * 3072 * 2 / 2**30
    with pytest.raises(InputError) as refused:
        check_memory([small, large], 24 << 30)
    needed = float(str(refused.value).partition(" needs ")[2].partition(" GiB")[0])
    assert weights < needed < weights + 20
    assert str(refused.value).endswith("24.0 GiB are free")
    monkeypatch.setattr(sweep, "available_bytes", lambda: 1000)
    with pytest.raises(InputError, match="GiB of memory on a host"):
        open_sweep(tmp_path / "s", [small])
    assert not (tmp_path / "s").exists()
    assert matrix.runs(small)


def test_memory_of_other_hosts_is_looked_at_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SLURM job is submitted from a host that runs none of its ranks."""
    monkeypatch.setattr(sweep, "available_bytes", lambda: 1000)
    cases = [case(ep=8)]
    assert open_sweep(tmp_path / "s", cases, elsewhere=True).cases == cases
    with pytest.raises(InputError, match="ep=8 must be at most ranks=4"):
        open_sweep(tmp_path / "t", cases, ranks=4, elsewhere=True)


def test_memory_that_the_control_group_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least of the host's and each control group's; the page cache is not in use."""
    own = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].splitlines()[:1]
    folder = tmp_path / (own[0] if own else "")
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    host = machine.available_bytes()
    assert host > 2 << 20
    (folder / "memory.max").write_text("1048576\n")
    (folder / "memory.current").write_text("1000000\n")
    (folder / "memory.stat").write_text("anon 9\nfile 900\ninactive_file 700\nactive_file 30\n")
    assert machine.available_bytes() == 1048576 - 1000000 + 730
    (folder / "memory.max").write_text("max\n")
    assert machine.available_bytes() > 2 << 20


def test_the_second_of_a_pair_waits_for_the_first_one_s_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "START_S", 0.3)
    monkeypatch.setattr(launching, "command", lambda *_: ["sleep", "1.5"])
    turns = [
        Job(name=f"j{turn}", cases=(case(),), settings=SETTINGS, limit_s=60.0, turn=turn, turns=2)
        for turn in (0, 1)
    ]
    (first,) = run_jobs(JobRun(turns[0], Folder(tmp_path), Hosts()))
    assert first.reason.startswith("no rank began within 0.3 s")
    (second,) = run_jobs(JobRun(turns[1], Folder(tmp_path), Hosts()))
    assert second.reason == ""


LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ["sweep", "local", "--out", LONG],
        ["run", "notebooks/01_reference_report.ipynb", "--out", LONG],
        ["report", "--out", LONG],
        ["calibrate", "--out", LONG],
        ["kernels", "--ptx", LONG, "--op", "release", "--target", "sm_90a"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_name_that_the_file_system_refuses_is_one_line(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workbench.cli", *arguments],
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    (line,) = done.stderr.strip().splitlines()[-1:]
    assert line.startswith("error: ")
    assert "File name too long" in line
    assert "Traceback" not in done.stderr
