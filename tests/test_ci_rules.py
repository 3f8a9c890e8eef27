"""The rules of a test run: a skip fails in CI, and `gpu` tests are deselected, not skipped."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
RUNS = "def test_runs():\n    assert True\n"
SKIPS = "import pytest\n\n\ndef test_skips():\n    pytest.skip('no browser')\n"
MODULE = "import pytest\n\npytest.importorskip('no_such_module_anywhere')\n"
GPU = "import pytest\n\n\n@pytest.mark.gpu\ndef test_gpu():\n    raise RuntimeError('ran')\n"


def _pytest(folder: Path, *sources: str, ci: str, args: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit code and output of a run under this project's own settings and conftest, and what that
    imports."""
    shutil.copy(ROOT / "tests/conftest.py", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests/interpreter.py", folder / "tests")
    for index, source in enumerate(sources):
        (folder / "tests" / f"test_{index}.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args],
        cwd=folder,
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("ci", "source", "reason"),
    [
        ("true", SKIPS, "no browser"),
        ("1", SKIPS, "no browser"),
        ("True", MODULE, "no_such_module_anywhere"),
    ],
)
def test_a_skip_fails_in_ci_and_says_so(tmp_path: Path, ci: str, source: str, reason: str) -> None:
    code, output = _pytest(tmp_path, RUNS, source, ci=ci)
    assert code == 1, output
    assert "with CI set a skip is a failure" in output
    assert reason in output
    assert "tests/test_1.py" in output


@pytest.mark.parametrize("ci", ["", "false"])
def test_a_skip_passes_elsewhere(tmp_path: Path, ci: str) -> None:
    code, output = _pytest(tmp_path, RUNS, SKIPS, ci=ci)
    assert code == 0, output
    assert "1 passed, 1 skipped" in output


def test_gpu_tests_are_deselected_by_default_and_run_on_demand(tmp_path: Path) -> None:
    code, output = _pytest(tmp_path, RUNS, GPU, ci="true")
    assert code == 0, output
    assert "1 passed, 1 deselected" in output
    shutil.rmtree(tmp_path / "tests")
    code, output = _pytest(tmp_path, RUNS, GPU, ci="true", args=("-m", "gpu"))
    wanted = (1, "RuntimeError: ran") if torch.cuda.is_available() else (4, "needs a CUDA device")
    assert code == wanted[0], output
    assert wanted[1] in output
