"""`workbench bench kernels` without a GPU says that nothing was run, and makes up no number."""

import json
import subprocess
import sys

from workbench.bench.kernel_bench import FIGURES


def test_without_a_gpu_every_figure_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "workbench.cli", "bench", "kernels", "--json"],
        capture_output=True, text=True, check=True, env={"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert json.loads(done.stdout) == dict.fromkeys(FIGURES, "not run on a GPU")
