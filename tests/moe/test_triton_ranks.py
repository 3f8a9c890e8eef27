"""Executor `triton` with peers in other processes: real ranks under torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from layer_cases import LIMIT

RANKS = Path(__file__).with_name("ranks_triton.py")


def found_by(kind, ranks, seeds, out, **environment):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts=0",
        f"--nproc-per-node={ranks}",
        RANKS,
        kind,
        out,
        *seeds,
    ]
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


def right(found):
    for case in found[0]:
        for name, error in case["errors"].items():
            assert error < LIMIT[case["dtype"]], (name, case)


@pytest.mark.parametrize("ranks", [2, 4])
def test_peers_in_other_processes(ranks, tmp_path):
    seeds = [101, 102, 103, 104]
    found = found_by("shared", ranks, seeds, tmp_path)
    assert [case["seed"] for case in found[0]] == seeds
    assert any(case["rows"] == 0 for case in found[-1])
    assert all(case["rows"] > 0 for case in found[0])
    right(found)


@pytest.mark.gpu
def test_two_ranks_on_one_gpu(tmp_path):
    found = found_by(
        "nvlink", 2, range(101, 111), tmp_path, TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1"
    )
    right(found)
