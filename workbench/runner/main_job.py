"""The main job: report, time model, explorers and local sweep by the strict runner, on one page."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from workbench.errors import InputError
from workbench.runner.notebook import new_run_dir, run_notebook
from workbench.runner.parameters import convert_all, notebook_parameters
from workbench.runner.parameters import parameters as checked

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "01_reference_report.ipynb"
MODEL_NOTEBOOK = NOTEBOOK.with_name("02_model_vs_measured.ipynb")
MODEL_FOLDER = "model"
SWEEP_NOTEBOOK = NOTEBOOK.with_name("06_sweep.ipynb")
SWEEP_FOLDER = "measured"
SHORT = {"warmups": 2, "windows": 5, "iterations": 4}
"""Protocol of the main job's own measurements: short, so that it ends within minutes."""
EXPLORERS = tuple(
    NOTEBOOK.with_name(f"{name}.ipynb") for name in ("03_imbalance", "04_width", "05_precision")
)


OnCell = Callable[[int, int], None]


def _silent(_name: str) -> AbstractContextManager[OnCell | None]:
    return nullcontext()


def build_report(
    out_root: str | Path | None = None,
    parameters: Mapping[str, Any] | None = None,
    around: Callable[[str], AbstractContextManager[OnCell | None]] = _silent,
    sweep: bool = False,
) -> Path:
    """Execute the report notebook into `out_root`/<run id>, and notebook 02 into `model` below it
    where the results can calibrate the time model, the explorers' notebooks into a folder each, and
    with `sweep` notebook 06 into `measured`: the local matrix on this machine. Returns the path of
    the index page.

    `around(name)` is entered for each notebook and yields its `on_cell`, as in `run_notebook`.

    `out_root` defaults to outputs/runs; `parameters` are those of the notebook, as values or as
    texts. Raises InputError for bad input before anything is written, and NotebookError where a
    cell fails.
    """
    from workbench.report.index import add_measured, add_notebook
    from workbench.report.study_report import ReportParameters, open_report

    for notebook in (NOTEBOOK, MODEL_NOTEBOOK, SWEEP_NOTEBOOK, *EXPLORERS):
        if not notebook.is_file():
            raise InputError(f"{notebook}: not found; the notebooks come with the repository")
    given = convert_all(NOTEBOOK, notebook_parameters(NOTEBOOK), parameters or {})
    p = checked(ReportParameters, given)
    open_report(p)
    folder = new_run_dir("report")
    if out_root is not None:
        folder = Path(out_root) / folder.name

    def execute(notebook: Path, out: Path, passed: Mapping[str, Any]) -> Path:
        with around(notebook.name) as on_cell:
            return out / str(run_notebook(notebook, out, passed, on_cell=on_cell).executed)

    executed = execute(NOTEBOOK, folder, given)
    index = folder / "index.html"
    add_notebook(index, executed)
    if _calibrates(p.results):
        passed = {"results": p.results, "formats": p.formats}
        add_notebook(index, execute(MODEL_NOTEBOOK, folder / MODEL_FOLDER, passed))
    for notebook in EXPLORERS:
        own = {"results": p.results} if p.results else {}
        add_notebook(index, execute(notebook, folder / notebook.stem, own))
    if sweep:
        measured = folder / SWEEP_FOLDER
        executed = execute(SWEEP_NOTEBOOK, measured, SHORT | {"formats": p.formats})
        add_measured(index, measured)
        add_notebook(index, executed)
    return index


def _calibrates(results: str) -> bool:
    """Whether the cases of `results` (a path, or empty for the study) determine the time model."""
    from workbench.model.calibrate import check_enough, device_of, measured_cases
    from workbench.records.results import REFERENCE, load_table

    try:
        table = measured_cases(load_table(results or REFERENCE))
        check_enough(table)
        device_of(table)
    except InputError:
        return False
    return True
