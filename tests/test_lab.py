"""What a save in JupyterLab writes, without JupyterLab; with it, see explore/test_browser.py."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from traitlets.utils.importstring import import_item

from workbench.lab import keep_without_outputs

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def lived_in(path: Path) -> Any:
    """A notebook as JupyterLab has it after a run."""
    content = nbformat.read(path, as_version=4)
    content.metadata.kernelspec.display_name = "Python 3 (ipykernel)"
    content.metadata.language_info = {"name": "python", "version": "3.11.2"}
    content.metadata.widgets = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    for n, cell in enumerate(c for c in content.cells if c.cell_type == "code"):
        cell.execution_count = n + 1
        cell.outputs = [nbformat.v4.new_output("stream", text="told")]
        cell.metadata["execution"] = {"iopub.status.idle": "2026-10-01T00:00:00Z"}
        cell.metadata["scrolled"] = True
        cell.metadata["jupyter"] = {"source_hidden": False}
    return content


def saved(content: Any, folder: Path, name: str) -> str:
    """The file's text after a save of `content` over it."""
    model = {"type": "notebook", "content": copy.deepcopy(content)}
    keep_without_outputs(model, name, SimpleNamespace(root_dir=str(folder)))
    nbformat.write(model["content"], folder / name)
    return (folder / name).read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_run_leaves_the_stored_file_as_it_is(path: Path, tmp_path: Path) -> None:
    (tmp_path / path.name).write_text(path.read_text())
    content = lived_in(path)
    assert saved(content, tmp_path, path.name) == path.read_text()
    code = next(c for c in content.cells if "parameters" in c.metadata.get("tags", []))
    code.source += "\nmine = 1"
    added = nbformat.v4.new_code_cell("1 + 1", id="new")
    added.outputs = [nbformat.v4.new_output("stream", text="2")]
    content.cells.append(added)
    (tmp_path / path.name).write_text(path.read_text())
    saved(content, tmp_path, path.name)
    now = nbformat.read(tmp_path / path.name, as_version=4)
    assert [c.source for c in now.cells] == [c.source for c in content.cells]
    assert not any(c.get("outputs") for c in now.cells)


def test_an_executed_or_another_notebook_is_saved_whole(tmp_path: Path) -> None:
    for executed in (True, False):
        content = lived_in(NOTEBOOKS[0])
        stored = copy.deepcopy(content)
        if not executed:
            for cell in (*content.cells, *stored.cells):
                cell.metadata.pop("tags", None)
            for cell in stored.cells:
                if cell.cell_type == "code":
                    cell.outputs = []
        nbformat.write(stored, tmp_path / "mine.ipynb")
        saved(content, tmp_path, "mine.ipynb")
        assert nbformat.read(tmp_path / "mine.ipynb", as_version=4) == content
    assert '"told"' in saved(lived_in(NOTEBOOKS[0]), tmp_path, "new.ipynb")


def test_make_lab_names_the_hook() -> None:
    option = "--ContentsManager.pre_save_hook="
    name = (ROOT / "Makefile").read_text().split(option)[1].split()[0]
    assert import_item(name) is keep_without_outputs
