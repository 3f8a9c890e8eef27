"""What JupyterLab may write into a notebook that is stored without outputs: its cells' text."""

import json
from pathlib import Path
from typing import Any

_OF_A_SESSION = ("collapsed", "execution", "jupyter", "scrolled")
"""Metadata of a cell that opening, running and folding change."""


def keep_without_outputs(model: dict[str, Any], path: str, contents_manager: Any) -> None:
    """A `pre_save_hook` of Jupyter's contents manager, so that opening and running a notebook of
    this project leaves its file as it is.

    A notebook with a cell tagged `parameters` that is stored without outputs keeps its metadata and
    stays without outputs; mutates `model`. Any other, an executed one among them, is saved whole.
    """
    file = Path(contents_manager.root_dir) / path
    if model["type"] != "notebook" or not file.is_file():
        return
    stored = json.loads(file.read_text())
    cells = {cell.get("id"): cell for cell in stored.get("cells", [])}
    tagged = any("parameters" in c["metadata"].get("tags", []) for c in cells.values())
    if not tagged or any(cell.get("outputs") for cell in cells.values()):
        return
    content = model["content"]
    content["metadata"] = stored["metadata"]
    content["nbformat_minor"] = stored["nbformat_minor"]
    for cell in content["cells"]:
        before = cells.get(cell.get("id"), {"metadata": {}})["metadata"]
        for name in _OF_A_SESSION:
            cell["metadata"].pop(name, None)
            if name in before:
                cell["metadata"][name] = before[name]
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
