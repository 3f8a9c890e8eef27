"""Peers that are known by address alone, on the simulated device: real ranks under torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANKS = Path(__file__).with_name("ranks_address.py")
SIMULATED = {
    "TRITON_INTERPRET": "1",
    "WORKBENCH_DEVICES": "tests.simulated_device",
    "PYTHONPATH": str(ROOT),
    "SIMULATED_GPUS": "4",
    "OMP_NUM_THREADS": "1",
}


def run(command, **environment):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | SIMULATED | environment,
    )


def told(what, out, **environment):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
    done = run([*launcher, "--nproc-per-node=3", RANKS, what, out], **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("what", ["late", "dead"])
def test_a_peer_that_does_not_come_is_named(what, tmp_path):
    found = told(what, tmp_path)
    for rank in (0, 2):
        error, in_time, again = found[rank]
        assert error.startswith(f"PeerError: rank {rank}: ranks [1] did not come at check"), error
        assert in_time
        assert again.startswith("ClosedError: group is closed: "), again


def test_memory_that_one_rank_cannot_have_is_the_same_error_on_all(tmp_path):
    found = told("memory", tmp_path, SIMULATED_BYTES="1:200000")
    assert found[0][0].startswith("MemoryError: rank 1: allocation failed: MemoryError: ")
    assert found == [[found[0][0], "done"]] * 3  # and the group goes on


MATRIX = """\
pipeline: [standard, alltoall]
mode: [inference, training]
ep: [2, 4]
T: 3
D: 16
E: 4
F: 8
imbalance: 1
"""


def sweep(folder, matrix, device, **environment):
    options = ["--warmups=0", "--windows=1", "--iterations=1", "--ranks=4"]
    return run(
        ["-m", "workbench.cli", "sweep", matrix, f"--device={device}", f"--out={folder}", *options],
        **environment,
    )


def records(folder):
    found = {}
    for path in (folder / "records").glob("*.record.json"):
        record = json.loads(path.read_text())
        ran = record["provenance"]
        kept = ("traffic", "routeTableRows", "launches", "plan")
        found[record["id"]] = (record.get("reason"), {name: ran.get(name) for name in kept})
    return found


def test_a_sweep_says_what_a_cpu_s_says(tmp_path):
    matrix = tmp_path / "m.yaml"
    matrix.write_text(MATRIX)
    for device in ("simulated", "cpu"):
        done = sweep(tmp_path / device, matrix, device)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "8 of 8 cases measured, 0 failed" in done.stdout
    assert records(tmp_path / "simulated") == records(tmp_path / "cpu")


@pytest.mark.parametrize(
    ("mutation", "reason"),
    [
        (
            "workbench.bench.meter|len(buffer.bases_P) == 1|buffer.all_P.shape[0] == 1",
            "GateError: bytes moved [[0, 0], [0, 0]] must be those of the route table",
        ),
        (
            "workbench.moe.groups.nvlink|torch.tensor(bases,|torch.tensor(bases[:1] * self.size,",
            "GateError: ",
        ),
    ],
)
def test_paths_that_only_addresses_take_are_gated(mutation, reason, tmp_path):
    matrix = tmp_path / "m.yaml"
    matrix.write_text(
        MATRIX.replace("[standard, alltoall]", "standard")
        .replace("[inference, training]", "inference")
        .replace("[2, 4]", "2")
    )
    modules = "tests.simulated_device,tests.mutation"
    sweep(tmp_path / "s", matrix, "simulated", WORKBENCH_DEVICES=modules, MUTATION=mutation)
    ((found, _),) = records(tmp_path / "s").values()
    assert found.startswith(reason)
