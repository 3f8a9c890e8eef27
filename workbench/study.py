"""The main job: report, time model and explorers through the strict runner, on one page."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import InputError
from workbench.notebook import new_run_dir, run_notebook
from workbench.parameters import convert_all, notebook_parameters
from workbench.parameters import parameters as checked

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "01_reference_report.ipynb"
MODEL_NOTEBOOK = NOTEBOOK.with_name("02_model_vs_measured.ipynb")
MODEL_FOLDER = "model"
EXPLORERS = tuple(
    NOTEBOOK.with_name(f"{name}.ipynb") for name in ("03_imbalance", "04_width", "05_precision")
)


def build_report(
    out_root: str | Path | None = None,
    parameters: Mapping[str, Any] | None = None,
    on_cell: Callable[[int, int], None] | None = None,
) -> Path:
    """Execute the report notebook into `out_root`/<run id>, and notebook 02 into `model` below it
    where the results can calibrate the time model, and the explorers' notebooks into a folder each.
    Returns the path of the index page.

    `out_root` defaults to outputs/runs; `parameters` are those of the notebook, as values or as
    texts. Raises InputError for bad input before anything is written, and NotebookError where a
    cell fails.
    """
    from workbench.report.index import add_notebook
    from workbench.report.report import ReportParameters, open_report

    for notebook in (NOTEBOOK, MODEL_NOTEBOOK, *EXPLORERS):
        if not notebook.is_file():
            raise InputError(f"{notebook}: not found; the notebooks come with the repository")
    given = convert_all(NOTEBOOK, notebook_parameters(NOTEBOOK), parameters or {})
    p = checked(ReportParameters, given)
    open_report(p)
    folder = new_run_dir("report")
    if out_root is not None:
        folder = Path(out_root) / folder.name
    run = run_notebook(NOTEBOOK, folder, given, on_cell=on_cell)
    index = folder / "index.html"
    add_notebook(index, folder / str(run.executed))
    if _calibrates(p.results):
        passed = {"results": p.results, "formats": p.formats}
        run = run_notebook(MODEL_NOTEBOOK, folder / MODEL_FOLDER, passed, on_cell=on_cell)
        add_notebook(index, folder / MODEL_FOLDER / str(run.executed))
    for notebook in EXPLORERS:
        passed = {"results": p.results} if p.results else {}
        run = run_notebook(notebook, folder / notebook.stem, passed, on_cell=on_cell)
        add_notebook(index, folder / notebook.stem / str(run.executed))
    return index


def _calibrates(results: str) -> bool:
    """Whether the cases of `results` (a path, or empty for the study) determine the time model."""
    from workbench.bench.record import REFERENCE, load_table
    from workbench.model.calibrate import check_enough, device_of, measured_cases

    try:
        table = measured_cases(load_table(results or REFERENCE))
        check_enough(table)
        device_of(table)
    except InputError:
        return False
    return True
