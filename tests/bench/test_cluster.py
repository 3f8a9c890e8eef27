"""Beyond one driver on one host: a real SLURM of one node, and two hosts as network namespaces."""

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_node import SlurmNode

from tests import needs
from workbench.bench.matrix import load_matrix
from workbench.records.record import read_record

COMMAND = [sys.executable, "-m", "workbench.cli", "sweep"]
SHORT = ["--warmups=0", "--windows=1", "--iterations=1", "--ranks=2"]
MATRIX = """\
pipeline: [standard, alltoall]
mode: [inference, training]
ep: 2
T: 24
D: 32
F: [16, 32]
imbalance: [1, 2]
"""


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(MATRIX)
    return path


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmNode]:
    node = SlurmNode(tmp_path_factory.mktemp("slurm"))
    try:
        node.start()
        yield node
    finally:
        node.stop()


def content(folder: Path) -> dict[str, object]:
    """What must not depend on who started the ranks, by case."""
    found = {}
    for path in sorted((folder / "records").glob("*.record.json")):
        record = read_record(path)
        told = record.provenance or {}
        found[record.id] = (
            record.status,
            told["checked"],
            told["traffic"],
            told["launches"],
            told["routeTableRows"],
            told["plan"],
            record.capacity,
        )
    return found


def test_slurm_submit_cancel_resume(slurm: SlurmNode, matrix: Path, tmp_path: Path) -> None:
    environment = os.environ | slurm.environment
    out = tmp_path / "by-slurm"
    command = [*COMMAND, str(matrix), "--out", str(out), "--slurm", *SHORT]
    first = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not list(out.glob("records/*.record.json")):
        assert time.monotonic() < end
        assert first.poll() is None
        time.sleep(0.01)
    (job,) = subprocess.run(
        ["squeue", "-h", "-o", "%i"], env=environment, text=True, capture_output=True, check=True
    ).stdout.split()
    subprocess.run(["scancel", "--full", job], env=environment, check=True)
    assert first.wait(60) == 1
    assert f"SLURM job {job} ended with" in (first.stderr.read() if first.stderr else "")
    done = {
        p: p.stat().st_mtime_ns
        for p in out.glob("records/*.record.json")
        if read_record(p).status == "ok"
    }
    assert 0 < len(done) < 16
    again = subprocess.run(
        [*COMMAND, "--out", str(out), "--resume", "--slurm", *SHORT[-1:]],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert again.returncode == 0, again.stderr
    assert "16 of 16 cases measured, 0 failed" in again.stdout
    assert all(path.stat().st_mtime_ns == written for path, written in done.items())
    direct = tmp_path / "direct"
    subprocess.run(
        [*COMMAND, str(matrix), "--out", str(direct), *SHORT],
        check=True,
        capture_output=True,
        timeout=120,
    )
    assert content(out) == content(direct)
    assert len(content(out)) == 16
    script = (out / "sweep.sbatch").read_text()
    assert "#SBATCH --requeue\n" in script


def test_slurm_requeue_goes_on(slurm: SlurmNode, matrix: Path, tmp_path: Path) -> None:
    environment = os.environ | slurm.environment
    out = tmp_path / "requeued"
    command = [*COMMAND, str(matrix), "--out", str(out), "--slurm", *SHORT]
    watcher = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not list(out.glob("records/*.record.json")):
        assert time.monotonic() < end
        assert watcher.poll() is None
        time.sleep(0.01)
    (job,) = subprocess.run(
        ["squeue", "-h", "-o", "%i"], env=environment, text=True, capture_output=True, check=True
    ).stdout.split()
    subprocess.run(["scontrol", "requeue", job], env=environment, check=True)
    # a requeued job is held back for two minutes unless it is told to begin now
    end = time.monotonic() + 60
    while (
        "PENDING"
        not in subprocess.run(
            ["squeue", "-h", "-o", "%T"],
            env=environment,
            text=True,
            capture_output=True,
            check=True,
        ).stdout
    ):
        assert time.monotonic() < end
        time.sleep(0.1)
    subprocess.run(
        ["scontrol", "update", f"JobId={job}", "StartTime=now"], env=environment, check=True
    )
    told, _ = watcher.communicate(timeout=120)
    assert watcher.returncode == 0
    assert "16 of 16 cases measured, 0 failed" in told


def test_slurm_that_is_not_there(matrix: Path, tmp_path: Path) -> None:
    command = [*COMMAND, str(matrix), "--slurm", *SHORT, "--out", str(tmp_path / "a")]
    nothing = subprocess.run(
        command, text=True, check=False, capture_output=True, env=os.environ | {"PATH": "/nowhere"}
    )
    assert nothing.returncode == 2
    assert nothing.stderr == "error: --slurm needs sbatch on the PATH, and there is none\n"


def test_slurm_that_refuses(slurm: SlurmNode, matrix: Path, tmp_path: Path) -> None:
    command = [*COMMAND, str(matrix), "--slurm", *SHORT, "--out", str(tmp_path / "b")]
    refused = subprocess.run(
        [*command, "--sbatch=--partition=gone"],
        text=True,
        check=False,
        capture_output=True,
        env=os.environ | slurm.environment,
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: sbatch refused {tmp_path}/b/sweep.sbatch: ")
    assert "partition" in refused.stderr


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str]]]:
    """Two network namespaces joined by a cable: (name, address) of each."""
    tag = uuid.uuid4().hex[:6]
    names = [f"wb{tag}{end}" for end in "ab"]

    needs.root("a network namespace")
    program = needs.program("ip")

    def ip(*arguments: str) -> None:
        subprocess.run([program, *arguments], check=True)

    try:
        for name in names:
            needs.permitted("ip", "netns", "add", name)
        ip(
            "link",
            "add",
            names[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            names[1],
            "netns",
            names[1],
        )
        for n, name in enumerate(names):
            # what `ip netns exec` lays over /etc/hosts: hosts know one another's names
            own = Path("/etc/netns", name)
            own.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(f"10.77.0.{k + 1} {o}" for k, o in enumerate(names))]
            (own / "hosts").write_text("\n".join(lines) + "\n")
            ip("-n", name, "addr", "add", f"10.77.0.{n + 1}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [(name, f"10.77.0.{n + 1}") for n, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run([program, "netns", "del", name], check=False)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def test_two_hosts_meet_by_rendezvous(
    hosts: list[tuple[str, str]], matrix: Path, tmp_path: Path
) -> None:
    out = tmp_path / "two"
    started = []
    for name, address in hosts:
        own = [
            *COMMAND,
            str(matrix),
            "--out",
            str(out),
            *SHORT,
            "--nnodes=2",
            f"--rdzv={hosts[0][1]}:29411",
            f"--local-addr={address}",
        ]
        entered = [
            "ip",
            "netns",
            "exec",
            name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname {name}; exec "$@"',
            "sh",
            *own,
        ]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": name}
        started.append(
            subprocess.Popen(
                entered, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        time.sleep(4)  # people start hosts one after the other, some seconds apart
    told = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [1, 1], told  # fused cases failed
    cases = load_matrix(matrix)
    assert len(list((out / "records").iterdir())) == len(cases) == 16
    for case in cases:
        record = read_record(out / "records" / f"{case.id}.record.json")
        if case.pipeline == "standard":
            assert record.reason == (
                "InputError: pipeline='standard' must have a group that sees its peers' memory,"
                " which group='collective' does not; use 'alltoall'"
            )
        else:
            assert record.status == "ok", record.reason
            traffic = (record.provenance or {})["traffic"]
            assert traffic["sentScaleUp"] == [0, 0]
            ways = 4 if case.mode == "training" else 2
            # half of all rows leave at EP 2, whatever the load
            assert sum(traffic["sentScaleOut"]) == 24 * 2 * ways * 32 * 2
            assert record.meanTXGBps is not None
            assert record.meanTXGBps > 0
