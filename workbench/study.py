"""The main job: the report notebook through the strict runner, then its page."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import InputError
from workbench.notebook import new_run_dir, run_notebook
from workbench.parameters import convert_all, notebook_parameters
from workbench.parameters import parameters as checked

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "01_reference_report.ipynb"


def build_report(
    out_root: str | Path | None = None,
    parameters: Mapping[str, Any] | None = None,
    on_cell: Callable[[int, int], None] | None = None,
) -> Path:
    """Execute the report notebook into `out_root`/<run id> and return the path of its index page.

    `out_root` defaults to outputs/runs; `parameters` are those of the notebook, as values or as
    texts. Raises InputError for bad input before anything is written, and NotebookError where a
    cell fails.
    """
    from workbench.report.index import add_notebook
    from workbench.report.report import ReportParameters, open_report

    if not NOTEBOOK.is_file():
        raise InputError(f"{NOTEBOOK}: not found; the notebooks come with the repository")
    given = convert_all(NOTEBOOK, notebook_parameters(NOTEBOOK), parameters or {})
    open_report(checked(ReportParameters, given))
    folder = new_run_dir("report")
    if out_root is not None:
        folder = Path(out_root) / folder.name
    run = run_notebook(NOTEBOOK, folder, given, on_cell=on_cell)
    index = folder / "index.html"
    add_notebook(index, folder / str(run.executed))
    return index
