"""The notebooks without a person: through `workbench run` and plain papermill, and bad input."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import needs
from tests.explore.test_precision import bad_tensors
from workbench.explore.imbalance import ImbalanceExplorer, ImbalanceParameters
from workbench.explore.precision import PrecisionExplorer, PrecisionParameters
from workbench.explore.width import WidthExplorer, WidthParameters

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COUNTS = np.random.default_rng(1).integers(0, 99, (4, 64))
SHAPE: Any = {"E": 64}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, cwd=ROOT, check=False
    )


def texts(notebook: Path) -> str:
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [o for c in cells for o in c.get("outputs", [])]
    return "".join("".join(o.get("text", "")) for o in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_stored_clean(path: Path) -> None:
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    for cell in cells:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        assert len("".join(cell["source"]).splitlines()) <= 15
        assert "def " not in "".join(cell["source"])
    assert sum("parameters" in c["metadata"].get("tags", []) for c in cells) == 1


def check_executed(folder: Path, name: str, figure: str, sentence: str) -> None:
    executed = folder / f"{name}.ipynb"
    assert executed.stat().st_size < 1_000_000
    content = executed.read_text()
    assert "application/vnd.jupyter.widget-view+json" not in content
    assert sentence.splitlines()[0] in texts(executed)
    assert (folder / f"{figure}.csv").is_file()
    assert (folder / f"{figure}-table.csv").is_file()
    needs.browser()
    assert "image/svg+xml" in content


def test_imbalance_with_a_trace_through_workbench_run(tmp_path: Path) -> None:
    trace = tmp_path / "counts.csv"
    np.savetxt(trace, COUNTS, fmt="%d", delimiter=",")
    done = run(
        "workbench.cli",
        "run",
        "notebooks/03_imbalance.ipynb",
        "--out",
        str(tmp_path / "o"),
        "-p",
        f"trace={trace}",
        "-p",
        'shape={"E": 64}',
        "-p",
        "ep=16",
        "-p",
        "system=mok native bf16",
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (p.parent for p in (tmp_path / "o").glob("*/run.json"))
    explorer = ImbalanceExplorer(
        ImbalanceParameters(trace=str(trace), shape=SHAPE, ep=16, system="mok native bf16")
    )
    check_executed(folder, "03_imbalance", "imbalance", explorer.sentence())


@pytest.mark.parametrize(
    ("name", "figure", "given", "sentence"),
    [
        (
            "03_imbalance",
            "imbalance",
            {"load": "B", "slotFactor": 0.5},
            lambda: ImbalanceExplorer(ImbalanceParameters(load="B", slotFactor=0.5)).sentence(),
        ),
        (
            "04_width",
            "width",
            {"F": 1536, "hardware": "H200"},
            lambda: WidthExplorer(WidthParameters(F=1536, hardware="H200")).sentence(),
        ),
        (
            "05_precision",
            "precision",
            {"data": "student_t", "metric": "dx"},
            lambda: PrecisionExplorer(
                PrecisionParameters(data="student_t", metric="dx")
            ).sentence(),
        ),
    ],
)
def test_plain_papermill(
    tmp_path: Path, name: str, figure: str, given: dict[str, Any], sentence: Any
) -> None:
    words = [w for k, v in given.items() for w in ("-p", k, str(v))]
    done = run(
        "papermill",
        f"notebooks/{name}.ipynb",
        str(tmp_path / f"{name}.ipynb"),
        "-p",
        "out_dir",
        str(tmp_path),
        *words,
    )
    assert done.returncode == 0, done.stderr
    check_executed(tmp_path, name, figure, sentence())


@pytest.mark.parametrize("name", ["00_index", "04_width", "05_precision"])
def test_defaults_through_workbench_run(tmp_path: Path, name: str) -> None:
    words = {"04_width": ["-p", "F=1536"], "05_precision": ["-p", "formats=bf16,nvfp4"]}
    done = run(
        "workbench.cli",
        "run",
        f"notebooks/{name}.ipynb",
        "--out",
        str(tmp_path),
        *words.get(name, []),
    )
    assert done.returncode == 0, done.stderr
    (executed,) = tmp_path.glob(f"*/{name}.ipynb")
    assert executed.stat().st_size < 1_000_000


@pytest.mark.parametrize("name", ["negative", "experts", "object"])
def test_a_bad_trace_on_the_command_line_is_one_line(tmp_path: Path, name: str) -> None:
    counts = COUNTS.astype(float)
    message = {
        "negative": "layer 1, expert 2: count=-3 must not be negative",
        "experts": "experts=64 must be E=384",
        "object": "which are never unpickled",
    }[name]
    if name == "negative":
        counts[1, 2] = -3
    path = tmp_path / "t.npz"
    np.savez(path, counts=counts.astype(object) if name == "object" else counts)
    shape = [] if name == "experts" else ["-p", 'shape={"E": 64}', "-p", "ep=16"]
    done = run(
        "workbench.cli",
        "run",
        "notebooks/03_imbalance.ipynb",
        "--out",
        str(tmp_path / "o"),
        "-p",
        f"trace={path}",
        *shape,
    )
    assert done.returncode == 1
    assert "InputError: t.npz: " in done.stdout + done.stderr
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_bad_tensor_on_the_command_line_is_one_line(tmp_path: Path) -> None:
    bad_tensors(tmp_path)
    done = run(
        "workbench.cli",
        "run",
        "notebooks/05_precision.ipynb",
        "--out",
        str(tmp_path / "o"),
        "-p",
        f"tensor={tmp_path / 'object.npy'},{tmp_path / 'integer.npy'}",
    )
    assert done.returncode == 1
    assert "must be a floating-point type" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "ran").exists()


def test_bench_explore_times_every_explorer() -> None:
    done = run("workbench.cli", "bench", "explore", "--changes", "20", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures.pop("changes") == 20
    names = [
        f"{name}_{figure}_ms"
        for name in ("imbalance", "width", "precision")
        for figure in ("p50", "p95", "max")
    ]
    assert list(figures) == names
    for p50, p95, most in zip(*[iter(figures.values())] * 3, strict=True):
        assert 0 < p50 <= p95 <= most
