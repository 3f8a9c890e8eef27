"""Each explorer in a real JupyterLab and Chromium: run, move, choose, load, and see the change."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.explore.conftest import Notebook
from workbench.explore.imbalance import ImbalanceExplorer, ImbalanceParameters
from workbench.explore.precision import PrecisionExplorer
from workbench.explore.precision_study import Study, sqnr
from workbench.explore.trace import load_trace
from workbench.explore.width import WidthExplorer, WidthParameters
from workbench.model.calibration import load_calibration

pytestmark = pytest.mark.browser

THIS, TIME = "this load", "Predicted time over imbalance"


def words(explorer: ImbalanceExplorer | WidthExplorer | PrecisionExplorer) -> str:
    """The first of what an explorer says, as the browser shows it."""
    return re.split(r"[;(\n]", explorer.sentence())[0].strip()


@pytest.mark.parametrize("notebook", ["03_imbalance.ipynb"], indirect=True)
def test_imbalance(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run_all()
    notebook.wait_text(words(ImbalanceExplorer()))

    plot = notebook.page.locator(".js-plotly-plot .subplot.x3y3")
    notebook.page.locator(".js-plotly-plot").scroll_into_view_if_needed()
    box = notebook.page.locator(".js-plotly-plot .draglayer .x3y3 .nsewdrag").bounding_box()
    assert plot.count() == 1
    assert box is not None
    notebook.page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.3 * box["height"])
    notebook.page.mouse.down()
    notebook.page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 0.9 * box["height"], steps=5)
    notebook.page.mouse.up()
    notebook.page.wait_for_timeout(500)
    zoomed = notebook.layout("xaxis3.range")
    assert zoomed[1] - zoomed[0] == pytest.approx(5, abs=0.5), "half of the 10 shown"

    notebook.press("factor", "ArrowRight", 12)
    factor = notebook.readout("factor")
    assert factor == pytest.approx(4.6)
    moved = ImbalanceExplorer(ImbalanceParameters(factor=factor))
    notebook.wait_text(words(moved))
    notebook.wait_trace(THIS, TIME, "x", [factor])
    case = moved.state.case(moved.state.system, imbalance=factor)
    expected = load_calibration().predict([case])["iterationMS"].tolist()
    notebook.wait_trace(THIS, TIME, "y", pytest.approx(expected))
    assert notebook.layout("xaxis3.range") == zoomed

    notebook.choose("backend", "mok")
    mok = {"system": "mok native mxfp8", "factor": factor}
    notebook.wait_text(words(ImbalanceExplorer(ImbalanceParameters(**mok))))
    assert notebook.control("pipeline").locator("option").all_inner_texts() == ["native"]
    assert notebook.layout("xaxis3.range") == zoomed
    notebook.shot("imbalance", 1300)

    notebook.type("E", "255")
    notebook.wait_text("EP is 51 in place of 32")
    notebook.type("E", "256")
    notebook.control("EP").locator("option:checked", has_text="32").wait_for(state="attached")
    notebook.type("E", "1e5")
    notebook.wait_text("Not possible: E=100000 must lie between 1 and 4096")
    assert notebook.control("E").locator("input").input_value() == "1e5"
    notebook.shot("imbalance-refused", 1300)
    notebook.type("E", "384")

    counts = np.random.default_rng(0).gamma(0.5, 1000, (12, 384)).astype(int)
    path = tmp_path / "counts.csv"
    np.savetxt(path, counts, fmt="%d", delimiter=",")
    notebook.upload(path)
    notebook.wait_text("counts.csv: 12 layers x 384 experts")
    traced = ImbalanceExplorer(ImbalanceParameters(**mok, trace=str(path)))
    notebook.wait_text(words(traced))
    by_rank = counts.reshape(12, 32, 12).sum(axis=2) / counts.sum(axis=1, keepdims=True)
    largest = (by_rank.max(axis=1) * 32).max()
    notebook.wait_trace(THIS, TIME, "x", pytest.approx([largest], rel=1e-3))
    assert load_trace(path).layers == 12

    notebook.shot("imbalance-traced", 1300)
    counts[3, 5] = -1
    np.savetxt(path, counts, fmt="%d", delimiter=",")
    notebook.upload(path)
    notebook.wait_text("counts.csv: layer 3, expert 5: count=-1 must not be negative")
    notebook.shot("imbalance-trace", 1300)
    notebook.shot("imbalance-trace", 1000)
    assert notebook.complaints() == []


@pytest.mark.parametrize("notebook", ["04_width.ipynb"], indirect=True)
def test_width(notebook: Notebook) -> None:
    notebook.run_all()
    notebook.wait_text(words(WidthExplorer()))
    for name, typed, rule in (
        ("F", "1e7", "F=10000000 must lie between 32 and 16384"),
        ("D", "7", "D=7 must lie between 64 and 16384"),
        ("K", "300", "K=300 must lie between 1 and 64"),
    ):
        before = notebook.control(name).locator("input").input_value()
        notebook.type(name, typed)
        notebook.wait_text(f"Not possible: {rule}")
        notebook.type(name, before)
        notebook.page.get_by_text("Not possible:").wait_for(state="detached")
    notebook.type("F", "1536")
    narrow = WidthExplorer(WidthParameters(F=1536))
    notebook.wait_text(words(narrow))
    notebook.wait_trace("this case", "Useful rate over F", "x", [1536])
    notebook.choose("hardware", "H200")
    other = WidthExplorer(WidthParameters(F=1536, hardware="H200"))
    notebook.wait_text(words(other))
    notebook.wait_trace(
        "does not run",
        "dist_moe against mok",
        "text",
        [why.split(":")[0] for why in other.table()["runs"].dropna()],
    )
    assert notebook.trace("this case", "Useful rate over F", "y") == []
    notebook.shot("width-H200", 1300)
    notebook.choose("hardware", "GB300")
    notebook.wait_text(words(narrow))
    notebook.shot("width", 1300)
    notebook.shot("width", 1000)
    assert notebook.complaints() == []


@pytest.mark.parametrize("notebook", ["05_precision.ipynb"], indirect=True)
def test_precision(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run_all()
    notebook.wait_text("SQNR of MLP out")
    notebook.choose("data", "heavy-tailed (Student t, 3)")
    heavy = sqnr(Study(kind="student_t"), "nvfp4")
    notebook.wait_text(f"NVFP4: {heavy['mlp']:.1f} dB")
    layer = "Error of a small real layer"
    notebook.wait_trace("NVFP4", layer, "y", pytest.approx(list(heavy.values())))
    notebook.shot("precision", 1300)

    path = tmp_path / "weights.npy"
    tensor = np.random.default_rng(1).laplace(size=(96, 640)).astype(np.float32)
    np.save(path, tensor)
    notebook.upload(path)
    notebook.wait_text("weights.npy: a tensor of 96 x 640")
    own = sqnr(Study(kind="tensor", tensor=torch.from_numpy(tensor)), "nvfp4")
    notebook.wait_text(f"NVFP4: {own['mlp']:.1f} dB")
    np.save(path, np.arange(6))
    notebook.upload(path)
    notebook.wait_text("dtype=int64 must be a floating-point type")
    notebook.shot("precision-tensor", 1000)
    assert notebook.complaints() == []


@pytest.mark.parametrize("notebook", ["00_index.ipynb"], indirect=True)
def test_index_leads_to_every_notebook(notebook: Notebook) -> None:
    notebook.run_all()
    notebook.page.get_by_text("NVIDIA GB300 (NVL72)").wait_for(timeout=30_000)
    links = notebook.page.locator(".jp-RenderedMarkdown a[href*='.ipynb']")
    named = {a.inner_text() for a in links.all()}
    others = {p.stem for p in notebook.lab.folder.glob("*.ipynb")} - {"00_index"}
    assert len(named) == len(others)
    links.filter(has_text="Imbalance").click()
    notebook.page.get_by_role("tab", name="03_imbalance.ipynb").wait_for(timeout=20_000)
    assert notebook.complaints() == []


@pytest.mark.parametrize("notebook", ["04_width.ipynb"], indirect=True)
def test_a_stored_notebook_stays_as_it_is(notebook: Notebook) -> None:
    """Opened and saved, and run and saved: the file has the same bytes as before."""
    path = notebook.lab.folder / notebook.name
    before = path.read_bytes()
    notebook.save(path)
    assert path.read_bytes() == before
    notebook.run_all()
    notebook.wait_text(words(WidthExplorer()))
    notebook.save(path)
    assert path.read_bytes() == before
    # what is written into a cell is kept
    edited = before.decode().replace("F = 3072", "F = 2048")
    notebook.page.locator(".jp-CodeCell .jp-Placeholder").first.click()
    notebook.page.locator(".jp-CodeCell .cm-line", has_text="F = 3072").first.click()
    notebook.page.keyboard.press("Home")
    for _ in range(len("F = ")):
        notebook.page.keyboard.press("ArrowRight")
    for _ in range(4):
        notebook.page.keyboard.press("Delete")
    notebook.page.keyboard.type("2048")
    notebook.save(path)
    assert path.read_text() == edited
    assert notebook.complaints() == []
