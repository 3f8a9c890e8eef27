"""`workbench bench kernels` without a GPU says so and fails; it makes up no number."""

import os
import subprocess
import sys


def test_without_a_gpu_it_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "workbench.cli", "bench", "kernels", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: bench kernels needs a CUDA device, and torch sees none\n"
